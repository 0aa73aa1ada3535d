"""Runs whose learning fails are rolled back or stopped at the onset; a transient failure changes no
weight.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest
from support.trainer_and_loop import LOOP, TRAINER

STEPS = ("--max-steps", "12", "--save-steps", "4")
COLLAPSE = str(SCRIPTS / "collapse.py")


@pytest.mark.parametrize(
    ("command", "reference"),
    [
        pytest.param(COLLAPSE, TRAINER, id="trainer"),
        pytest.param(str(SCRIPTS / LOOP), LOOP, id="loop", marks=pytest.mark.full),
    ],
)
def test_a_transient_nan_ends_in_the_weights_of_the_undisturbed_run(
    command: str, reference: str, runs: Runs, tmp_path: Path
) -> None:
    """The loss of one rank is NaN once: one exact repetition, and nothing else differs."""
    run = (
        runs("--nproc-per-node", "2", command, "--output-dir", "out", *STEPS, "--nan-at", "6").start().ended()
    )
    assert digest(tmp_path / "out") == undisturbed(reference, 12)
    (recovery,) = run.status()["recoveries"]
    assert (recovery["cause"], recovery["step"]) == ("nonfinite", 6)
    assert recovery["action"] == "restart_from_earlier_checkpoint"
    (trip,) = run.events("guard_tripped")
    assert (trip["guard"], trip["onset"], trip["response"]) == ("nonfinite", 6, "roll-back")
    assert run.events("reseeded") == []
    assert all(event["step"] < 6 for event in run.events("checkpoint_staged") if event["attempt"] == 0)
    (incident,) = (run.directory / "incidents").iterdir()
    assert incident.name == "0001-nonfinite"
    assert run.verdicts()[0]["guard"]["step"] == 6


@pytest.mark.full
def test_fresh_seeds_cure_what_an_exact_repetition_does_not(runs: Runs, tmp_path: Path) -> None:
    """The run ends; a later kill does not seed it a second time."""
    run = runs(
        "--nproc-per-node", "1", COLLAPSE, "--output-dir", "out", *STEPS, "--nan-at", "6", "--cured-by-seeds",
        "--step-seconds", "0.1",
    ).start()  # fmt: skip
    run.until_step(9)
    run.kill(0)
    run.ended()
    assert [event["cause"] for event in run.events("incident")] == ["nonfinite", "nonfinite", "signal"]
    assert len(run.events("reseeded")) == 1


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("stop", 93),
        pytest.param("roll-back", 93, marks=pytest.mark.full),
        pytest.param("warn", 0, marks=pytest.mark.full),
    ],
)
def test_a_reward_collapse_is_answered_at_its_onset(
    response: str, code: int, runs: Runs, tmp_path: Path
) -> None:
    """Within two steps; a rollback resumes from before the onset and sets aside what was saved since."""
    run = runs(
        "--nproc-per-node", "1", "--guard", f"reward={response}", "--snapshot-every", "0", COLLAPSE,
        "--output-dir", "out", "--max-steps", "36", "--save-steps", "12" if response == "stop" else "1",
        "--reward-falls-at", "24",
    ).start()  # fmt: skip
    run.ended(code)
    trips = run.events("guard_tripped")
    assert {trip["guard"] for trip in trips} == {"reward"}
    assert all(trip["onset"] == 24 and trip["step"] <= 26 for trip in trips), trips
    assert len(trips) == {"stop": 1, "roll-back": 3, "warn": 1}[response]
    if response == "warn":
        assert run.status()["recoveries"] == []
        return
    assert max(event["step"] for event in run.events("step_committed")) <= 26
    if response == "roll-back":
        resumed = [event["step"] for event in run.events("resume_chosen")][1:]
        assert resumed == [23, 23]
        assert (tmp_path / "out" / "rejected-checkpoint-24").is_dir()
        assert [event["step"] for event in run.events("reseeded")] == [24]


@pytest.mark.full
@pytest.mark.parametrize("mode", ["zero2", "zero3", "fsdp2"])
def test_a_transient_nan_in_every_parallel_mode(mode: str, runs: Runs, tmp_path: Path) -> None:
    """The norm of the gradient is DeepSpeed's or that of shards; one exact repetition all the same."""
    digests = {}
    for name, extra in (("undisturbed", ()), ("nan", ("--nan-at", "6"))):
        run = runs(
            "--nproc-per-node", "2", COLLAPSE, "--output-dir", str(tmp_path / name), *STEPS, *extra,
            "--marker", str(tmp_path / "nan-once"), name=f"run-{name}", mode=mode,
        ).start().ended()  # fmt: skip
        assert [trip["onset"] for trip in run.events("guard_tripped")] == ([6] if extra else [])
        digests[name] = digest(tmp_path / name)
    assert digests["nan"] == digests["undisturbed"]
