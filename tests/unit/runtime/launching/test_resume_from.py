"""The early check of `--resume-from`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.launch_commands import prepare
from support.identities import identity
from support.journal import as_event

from grpo_run.runtime.checkpoints.manifest import write_manifest
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching._identity import check_against_run
from grpo_run.runtime.snapshots.slot import STAGED

OWN = Path("runs/mine")


def make_checkpoint(path: Path, run_id: str) -> None:
    """A published checkpoint of a run."""
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    write_manifest(path, identity(step=5, run_id=run_id))


def history_with_snapshot(directory: RunDirectory, area: Path, step: int) -> History:
    """A run whose supervisor was killed after it had a snapshot in memory."""
    (area / "slot0").mkdir(parents=True)
    (area / "slot0" / STAGED).write_text("{}")
    directory.create()
    directory.write_run({"run_id": "run-1", "snapshot_directory": str(area)})
    history = History()
    history.apply(as_event({"event": "step_committed", "step": step, "train_call": 1}))
    history.apply(as_event({"event": "checkpoint_staged", "step": step, "train_call": 1}))
    return history


@pytest.mark.parametrize("step", [5, 7])
def test_a_newer_snapshot_in_memory_is_not_given_up(here: Path, step: int) -> None:
    """The refusal names it and both ways to go on; the newest checkpoint itself may be named."""
    make_checkpoint(here / "out" / "checkpoint-5", "run-1")
    directory = RunDirectory(path=here / "mine")
    history = history_with_snapshot(directory, here / "memory", step)
    words = ["--run-id", "run-1", "--resume-from", "out/checkpoint-5", "train.py"]
    config = prepare(words).config
    if step == 5:
        check_against_run(config, directory, history)
        return
    with pytest.raises(
        UsageError, match=r"newer snapshot in memory, of step 7.*--fresh.*leave --resume-from out"
    ):
        check_against_run(config, directory, history)


def test_a_copy_of_the_runs_checkpoint_is_used_if_the_run_has_no_other(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its output directory is empty, so there is nothing to lose and nothing to say."""
    make_checkpoint(here / "backup" / "checkpoint-5", "run-1")
    config = prepare(["--run-id", "run-1", "--resume-from", "backup/checkpoint-5", "train.py"]).config
    check_against_run(config, RunDirectory(path=here / "mine"), History())
    assert capsys.readouterr().out == ""
