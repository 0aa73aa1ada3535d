"""When a rank is killed or raises, the run recovers and ends with the weights of the undisturbed run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from faults import fault
from support.references import undisturbed
from support.runs import SCRIPTS, WITH_SCRIPTS, Runs, before_training, digest
from support.trainer_and_loop import LOOP, TRAINER

from grpo_run.watchdog.observation import Phase


@pytest.mark.parametrize(
    "script",
    [TRAINER, pytest.param("rloo.py", marks=pytest.mark.full), pytest.param(LOOP, marks=pytest.mark.full)],
)
def test_kill_between_checkpoints_changes_no_weight(script: str, runs: Runs, tmp_path: Path) -> None:
    """SIGKILL of a rank between two checkpoints causes one recovery; the weights equal torchrun's.

    The incident contains the surviving rank's stack with the line where it waited, read before it was ended.
    """
    steps = ("--max-steps", "12", "--save-steps", "4")
    run = runs("--nproc-per-node", "2", str(SCRIPTS / script), "--output-dir", "ours", *steps)
    with run.held(after=6):
        run.start().until_step(6)
        run.until_phase(0, Phase.forward_backward if script == LOOP else Phase.reward)
        run.kill(1)
        run.until_event("attempt_started", attempt=1)
    run.ended()
    assert digest(tmp_path / "ours") == undisturbed(script, 12)
    (recovery,) = run.status()["recoveries"]
    assert recovery["cause"] == "signal"
    assert recovery["rank"] == 1
    assert recovery["action"] == "restart"
    assert recovery["lost_steps"] <= 4
    assert recovery["detection_seconds"] is not None
    assert recovery["recovery_seconds"] is not None
    (incident,) = (run.directory / "incidents").iterdir()
    assert incident.name == "0001-signal"
    (verdict,) = run.verdicts()
    assert verdict["culprits"] == [1]
    assert verdict["waiters"] == [0]
    assert "SIGKILL" in verdict["sentence"]
    stack = (incident / "stacks" / "rank0.txt").read_text()
    assert "Current thread" in stack or "Thread" in stack
    assert "in overlap" in stack  # the survivor was in its reward function
    assert (incident / "memory" / "rank0.status").read_text().count("VmRSS") == 1
    memory = json.loads((incident / "memory" / "phases.json").read_text())
    assert set(memory) == {"0", "1"}
    assert all(one["phases"]["optimizer"]["resident_bytes"] > 0 for one in memory.values())


def test_a_mixture_of_experts_keeps_its_experts(runs: Runs, tmp_path: Path) -> None:
    """transformers saves them under other names than the model has, and does not find them when it
    resumes.
    """
    run = runs(
        "--nproc-per-node", "2", *fault("kill", rank=1, step=5), str(SCRIPTS / "experts.py"),
        "--output-dir", "ours", "--max-steps", "8", "--save-steps", "4",
    ).start().ended()  # fmt: skip
    assert digest(tmp_path / "ours") == undisturbed("experts.py", 8)
    assert len(run.status()["recoveries"]) == 1


def test_finished_train_call_is_restored_and_not_repeated(runs: Runs, tmp_path: Path) -> None:
    """A rank killed in the second `train()` call does not repeat the first; the weights are equal."""
    arguments = ("--max-steps", "12", "--save-steps", "4")
    run = runs("--nproc-per-node", "2", str(SCRIPTS / "sft_then_grpo.py"), "--output-dir", "ours", *arguments)
    with run.held(after=8 + 2):
        run.start().until_step(2, train_call=2)
        run.kill(0)
    run.ended()
    assert digest(tmp_path / "ours") == undisturbed("sft_then_grpo.py", 12)
    restored = run.events("train_restored")
    assert [event["train_call"] for event in restored] == [1]
    second = [e for e in run.events("step_committed") if e["attempt"] == 1]
    assert {event["train_call"] for event in second} == {2}


def test_exception_prints_the_users_traceback_and_stops(runs: Runs, tmp_path: Path) -> None:
    """A failure of the script before its first step ends the run: traceback, and exit code 93."""
    (tmp_path / "broken.py").write_text(
        "def setup():\n    raise KeyError('no such column: prompt')\n\nsetup()\n"
    )
    run = runs("--nproc-per-node", "2", "broken.py").start()
    run.ended(93)
    text = run.printed()
    assert "no such column: prompt" in text
    assert 'broken.py", line 2, in setup' in text
    assert "runpy" not in text.split("Traceback")[-1]
    status = run.status()
    assert status["attempts"] == 1
    assert [recovery["cause"] for recovery in status["recoveries"]] == ["startup_failure"]
    assert [recovery["action"] for recovery in status["recoveries"]] == ["stop"]


LEAVE = """
    import os, pathlib, sys, transformers

    class Leave(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5 and not pathlib.Path("left").exists():
                pathlib.Path("left").touch()
                HOW

    trainer.add_callback(Leave())
"""


@pytest.mark.parametrize("how", ["os._exit(0)", pytest.param("sys.exit(0)", marks=pytest.mark.full)])
def test_a_rank_that_exits_with_0_inside_training_has_not_finished(
    how: str, runs: Runs, tmp_path: Path
) -> None:
    """It is a fault with its line or position, not "Finished at step 4 of 12"."""
    before_training(tmp_path / "leaves.py", LEAVE.replace("HOW", how))
    run = runs(
        "--nproc-per-node", "1", "leaves.py", "--output-dir", "ours", "--max-steps", "8", "--save-steps", "2",
        environment=WITH_SCRIPTS
    ).start().ended()  # fmt: skip
    (incident,) = run.events("incident")
    assert incident["cause"] == "rank_exited_early"
    assert "exited with code 0 in step 5" in incident["sentence"]
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, 8, ranks=1)
