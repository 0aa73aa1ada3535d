"""A hand-written loop that is killed ends as the undisturbed one: weights, and every number of every step."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.loops import differences, kills, launched, undisturbed
from support.runs import Runs

from grpo_run.runtime.checkpoints.manifest import read_manifest

CELLS = [
    pytest.param(form, mode, ranks, workers, id=f"{form}-{mode}-{ranks}{'-workers' if workers else ''}")
    for form, mode, ranks, workers in (
        ("for", "none", 1, ()),
        ("for", "ddp", 2, ()),
        ("for", "ddp", 3, ()),
        ("for", "none", 2, ()),
        ("data", "none", 1, ()),
        ("data", "none", 1, ("--workers", "1")),
        ("data", "none", 1, ("--workers", "1", "--keep-workers")),
        ("data", "ddp", 2, ()),
        ("data", "ddp", 3, ()),
        ("while", "none", 1, ()),
        ("while", "ddp", 2, ()),
        ("while", "ddp", 3, ()),
        ("while", "fsdp2", 2, ()),
        ("for", "fsdp2", 2, ()),
        ("data", "fsdp2", 2, ()),
    )
]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("form", "mode", "ranks", "workers"), CELLS)
def test_a_loop_killed_at_every_step_equals_the_undisturbed_one(
    form: str, mode: str, ranks: int, workers: tuple[str, ...], tmp_path: Path, runs: Runs
) -> None:
    """Two epochs and a part of the third: 14 steps of one rank, 6 to 8 of several."""
    steps = 14 if ranks == 1 else 8
    words = ("--form", form, "--mode", mode, "--steps", str(steps), *workers)
    expected = undisturbed(tmp_path, *words, ranks=ranks)
    killed = kills(range(1, steps + 1), ranks)
    run = launched(runs, tmp_path, *words, ranks=ranks, options=killed).start().ended(timeout_seconds=400)
    assert len(run.events("fault_injected")) == steps, run.tail()
    assert any(event["in_memory"] for event in run.events("resume_chosen")), run.tail()
    different = differences(tmp_path / "out", expected)
    assert not different, "\n".join([*different, run.tail()])


def test_a_loop_over_data_killed_in_two_epochs_equals_the_undisturbed_one(tmp_path: Path, runs: Runs) -> None:
    """The global generator draws the order, the samples and the dropout."""
    words = ("--form", "data", "--steps", "9")
    expected = undisturbed(tmp_path, *words)
    run = launched(runs, tmp_path, *words, options=kills((4, 8), 1)).start().ended()
    assert not (different := differences(tmp_path / "out", expected)), "\n".join([*different, run.tail()])


@pytest.mark.parametrize(
    ("form", "mode", "ranks"),
    [("data", "none", 1), ("for", "ddp", 2), ("data", "ddp", 3), ("for", "fsdp2", 2)],
)
@pytest.mark.full
def test_a_kill_in_the_next_loop_repeats_no_further_step_of_one_that_was_left_by_break(
    form: str, mode: str, ranks: int, tmp_path: Path, runs: Runs
) -> None:
    """The script counts the steps until its `break` in a variable of its own, which a restart sets to 0
    again.
    """
    words = ("--form", form, "--mode", mode, "--steps", "20", "--leave-after", "7", "--twice")
    expected = undisturbed(tmp_path, *words, ranks=ranks)
    options = ("--snapshot-every", "3")
    run = launched(runs, tmp_path, *words, "--kill-behind", ranks=ranks, options=options).start().ended()
    assert len(run.events("incident")) == 1, run.tail()
    assert [event["step"] for event in run.events("train_started") if event["rank"] == 0] == [0, 0, 6, 0]
    assert "loop 1 ends after step 7: the script left it there before the restart" in run.printed()
    assert run.status()["state"] == "finished"
    assert not (different := differences(tmp_path / "out", expected)), "\n".join([*different, run.tail()])


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_loop_is_stopped_saved_and_survives_its_supervisor(tmp_path: Path, runs: Runs) -> None:
    """`save`, `stop`, another number of ranks, a SIGKILL of the supervisor: the loop ends as the undisturbed
    one.
    """
    words = ("--form", "data", "--mode", "ddp", "--steps", "30")
    expected = undisturbed(tmp_path, *words, ranks=2)
    slow = (*words, "--step-seconds", "0.3", "--save-every", "4", "--save-total-limit", "1")
    run = launched(runs, tmp_path, *slow, ranks=2).start()
    run.until_step(2)
    kept = Path(run.command("save", "--wait").strip())
    assert read_manifest(kept).kept
    run.command("stop")
    run.ended(75)
    stopped_at = run.status()["checkpoint"]["step"]
    other = launched(runs, tmp_path, *slow, ranks=1, options=("--run-dir", str(run.directory))).start()
    other.ended(2)
    assert "start 2 ranks" in other.printed()
    run.start()
    run.until_step(stopped_at + 3)
    run.process.kill()
    run.process.wait()
    run.start().ended()
    assert [event["step"] for event in run.events("train_started") if event["rank"] == 0][1] == stopped_at
    assert not (different := differences(tmp_path / "out", expected)), "\n".join([*different, run.tail()])
    assert kept.exists()
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-28"]
