"""Snapshots that a full disk kept in memory are written by the next launch of the same command."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.journal import event
from support.slots import fill, snapshot

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.reader import read_journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching import _staging as module
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.ownership import describe_owner, private_folder, take_area


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has finished."""
    made = RunDirectory(path=tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def kept(run: RunDirectory, tmp_path: Path) -> Path:
    """Create the staging area of the run, with a checkpoint that the script asked for."""
    memory = tmp_path / "memory"
    memory.mkdir()
    folder = private_folder(memory)
    assert folder is not None
    taken = take_area(
        folder,
        None,
        describe_owner("night", run.path),
        lambda path, earlier: run.write_run({"snapshot_directory": str(path)}),
    )
    os.close(taken.lock)
    fill(StagingArea(taken.path).slots[0], snapshot(tmp_path / "out"))
    return taken.path


def test_next_launch_writes_kept_snapshots(
    kept: Path, run: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real drain worker publishes the snapshot, and the staging area is removed."""
    found = module.find(run, "night")
    assert found is not None
    assert found.path == kept
    module.write_kept_checkpoints(found, run, "night", History.of(read_journal(run.journal)))
    path = tmp_path / "out" / "checkpoint-5"
    verify_digests(path, read_manifest(path).files)
    assert not kept.exists()
    assert [json.loads(line)["event"] for line in run.journal.read_text().splitlines()] == [
        "checkpoint_published"
    ]
    assert f"wrote {path} (" in capsys.readouterr().out


@pytest.mark.parametrize("lost", [False, True])
def test_a_run_whose_script_ran_to_its_end_has_finished_when_everything_is_written(
    kept: Path, run: RunDirectory, tmp_path: Path, lost: bool
) -> None:
    """Unless a checkpoint is lost for good; the sentence of its end then says that the others are written."""
    journal = Journal(run.journal, "night")
    journal.write(event("train_started", rank=0, train_call=1, step=0, target_steps=5))
    journal.write(event("step_committed", step=5, train_call=1))
    if lost:
        journal.write(
            event(
                "checkpoint_failed",
                step=2,
                path="/out/checkpoint-2",
                train_call=1,
                reason="no room.",
                lost=True,
            )
        )
    journal.write(
        event("run_ended", exit_code=93, sentence="only in memory", snapshots_kept=True, completed=True)
    )
    found = module.find(run, "night")
    assert found is not None
    before = History.of(read_journal(run.journal))
    assert module.write_kept_checkpoints(found, run, "night", before) is None
    history = History.of(read_journal(run.journal))
    assert history.completed
    assert history.finished is not lost
    assert history.snapshot_step is None
    if lost:
        assert history.exit_code == 93
        assert history.sentence == f"only in memory {module.SINCE_WRITTEN}"
    else:
        assert history.sentence.endswith(f"Last checkpoint: {tmp_path}/out/checkpoint-5.")


def test_snapshots_older_than_the_run_are_not_written(kept: Path, run: RunDirectory) -> None:
    """The run went on and finished on another machine, where its supervisor took another area."""
    run.write_run({"snapshot_directory": "/dev/shm/grpo-run-0/0123456789abcdef"})
    assert module.find(run, "night") is None
    assert kept.exists(), "only gc removes it"
