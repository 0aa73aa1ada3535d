"""What a command continues: its own run after any change of supervision, and nothing else without being
asked.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, WITH_SCRIPTS, Run, Runs, digest

from grpo_run.runtime.launch.imported_files import read_record

STEPS = ("--max-steps", "12", "--save-steps", "8", "--output-dir", "ours", "--step-seconds", "0.03")


@pytest.fixture
def stopped(runs: Runs, tmp_path: Path) -> Run:
    """A run of a script in the working directory that was stopped with a checkpoint."""
    shutil.copy(SCRIPTS / "grpo.py", tmp_path / "train.py")
    run = runs("train.py", *STEPS, environment={**WITH_SCRIPTS, "SEED": "1"})
    return run.stopped(after=3)


def starts(run: Run) -> list[int]:
    """The step at which each attempt began to train."""
    return [event["step"] for event in run.events("train_started")]


def checkpoints(folder: Path) -> set[str]:
    """The checkpoints in an output directory."""
    return {path.name for path in (folder / "ours").glob("checkpoint-*")}


def refused(run: Run) -> str:
    """Start the run, which must be refused with exit code 2; return what it prints, which may include its
    progress.
    """
    before = len(run.printed())
    run.start().ended(2)
    return run.printed()[before:]


def test_options_of_supervision_continue_the_run_and_changes_of_training_are_asked_about(
    stopped: Run, runs: Runs, tmp_path: Path
) -> None:
    """An edited script, a variable and a cap are refused by name, then accepted; the weights are
    unchanged.
    """
    saved, step = checkpoints(tmp_path), stopped.status()["checkpoint"]["step"]
    assert {"train.py", str(SCRIPTS / "tiny.py")} <= read_record(stopped.directory / "imports.json").keys()
    original = (tmp_path / "train.py").read_text()
    words = stopped.arguments
    (tmp_path / "train.py").write_text(original + "\n# edited\n")
    stopped.environment["SEED"] = "2"
    stopped.arguments = ["--generation", "max_time=1000", *words]
    line = refused(stopped)
    for named in (
        "train.py was edited", "SEED 1 -> 2", "--generation max_time not set -> 1000", "--accept-change",
        "--fresh",
    ):  # fmt: skip
        assert named in line, line
    assert checkpoints(tmp_path) == saved
    (tmp_path / "train.py").write_text(original)
    stopped.environment["SEED"] = "1"
    stopped.arguments = [
        "--max-restarts", "10", "--deadline-floor", "90", "--stop-timeout", "60", "./train.py", *STEPS,
    ]  # fmt: skip
    stopped.start().ended()
    assert starts(stopped) == [0, step]
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 12, ranks=1)
    (tmp_path / "train.py").write_text(original + "\n# edited\n")
    assert "has finished" in refused(stopped)
    (tmp_path / "train.py").write_text(original)
    shutil.rmtree(tmp_path / "ours")
    assert "is gone; use --fresh" in refused(stopped)


@pytest.mark.full
def test_another_command_does_not_train_over_a_run_that_has_not_finished(
    stopped: Run, runs: Runs, tmp_path: Path
) -> None:
    """Neither in its run directory nor in its output directory; `--fresh` says that it may."""
    saved = checkpoints(tmp_path)
    words = ["train.py", *STEPS, "--learning-rate", "0.1"]
    stopped.arguments = words
    assert "of another command" in refused(stopped)
    other = runs(*words, name="other", environment=WITH_SCRIPTS)
    line = refused(other)
    assert f"--resume-from {stopped.events('run_started')[0]['run']}" in line
    assert checkpoints(tmp_path) == saved
    fresh = runs("--fresh", *words, name="fresh", environment=WITH_SCRIPTS).start()
    fresh.ended()
    assert starts(fresh) == [0]


@pytest.mark.full
def test_another_run_starts_from_an_older_checkpoint_and_never_returns_to_the_newer_ones(
    runs: Runs, tmp_path: Path
) -> None:
    """The run itself refuses to go back; the other one, with a directory of its own, recovers from what it
    has saved.
    """
    words = [str(SCRIPTS / "grpo.py"), "--max-steps", "24", "--save-steps", "4", *STEPS[4:]]
    first = runs(*words)
    first.stopped(after=14)
    saved, attempts = checkpoints(tmp_path), len(starts(first))
    first.arguments = ["--resume-from", "ours/checkpoint-4", *words]
    line = refused(first)
    assert "has a newer checkpoint" in line
    assert "--fresh" in line
    assert len(starts(first)) == attempts
    assert checkpoints(tmp_path) == saved
    other = runs("--fresh", *first.arguments, name="other")
    with other.held(after=5):
        other.start().until_step(9)
        other.kill(0)
    other.ended()
    begun, recovered = starts(other)
    assert begun == 4
    assert 4 < recovered <= 10
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 24, ranks=1)
