"""`Saver.finish` returns the durable checkpoint of the last step, or None."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.identities import identity
from support.saving import Guarded, named

from grpo_run.runtime.checkpoints.manifest import TrainCall, read_manifest, write_manifest
from grpo_run.watchdog.causes import Cause

Polls = list[Callable[[], Any]]

Events = Callable[[], list[dict[str, Any]]]


def test_the_last_step_is_saved_if_the_schedule_did_not_save_it(direct: Guarded) -> None:
    """It is saved once; an existing checkpoint is kept."""
    direct.trainer.state.global_step = 7
    path = direct.saver.finish()
    assert path is not None
    assert read_manifest(path).step == 7
    assert direct.trainer.seen == [(direct.trainer.model_wrapped, None, None)]
    assert direct.saver.finish() == path
    assert len(direct.trainer.seen) == 1


@pytest.mark.parametrize(
    ("scheduled", "last", "name"),
    [(True, 5, "checkpoint-5"), (True, 7, "snapshot-7"), (False, 5, "snapshot-5")],
    ids=["saved by the script", "not saved", "only in memory"],
)
def test_finish_waits_until_the_last_step_is_durable(
    staged: Guarded, polls: Polls, scheduled: bool, last: int, name: str
) -> None:
    """The call is marked as finished only when its checkpoint is on disk. A last step that the script has not
    saved gets a snapshot that reaches the disk; an earlier one may stay in memory forever.
    """
    staged.save(5) if scheduled else staged.step(5)
    staged.trainer.state.global_step = last
    polls += [lambda: None, staged.drain, lambda: None]
    path = staged.saver.finish()
    assert path is not None
    assert path.name == name
    manifest = read_manifest(path)
    assert (manifest.step, manifest.scheduled) == (last, name.startswith("checkpoint"))
    assert len(staged.trainer.seen) == (1 if manifest.scheduled else 2)
    assert staged.session.notified == []


def test_a_last_step_that_cannot_be_written_is_left_to_the_supervisor(
    staged: Guarded, polls: Polls, events: Events
) -> None:
    """The script continues. The drain has warned, and the end of the run says where the checkpoint is."""
    staged.save(5)
    polls += [lambda: staged.snapshots.staging.set_trouble(Cause.disk_full)]
    assert staged.saver.finish() is None
    assert staged.session.notified == []
    assert "is not on disk yet" in named(events, "warning")[0]["text"]


def test_a_durable_last_step_is_not_saved_again(staged: Guarded, polls: Polls) -> None:
    """It was drained or saved directly."""
    staged.trainer.args.metric_for_best_model = "reward"
    path = staged.save(5)
    assert staged.saver.finish() == path
    assert len(staged.trainer.seen) == 1


@pytest.mark.parametrize("other", [{"run_id": "run-0"}, {"ordinal": 2}])
def test_a_checkpoint_of_another_run_or_call_is_not_the_end(
    direct: Guarded, call: TrainCall, other: dict[str, Any]
) -> None:
    """It has the same step number and directory."""
    path = Path(call.output_dir) / "checkpoint-7"
    path.mkdir(parents=True)
    (path / "old.bin").write_bytes(b"old")
    write_manifest(path, identity(call.output_dir, 7, **other))
    direct.trainer.state.global_step = 7
    end = direct.saver.finish()
    assert end is not None
    assert end != path
    assert (path / "old.bin").exists()
    manifest = read_manifest(end)
    assert (manifest.run_id, manifest.train_call.ordinal) == ("run-1", 1)


def test_a_non_finite_last_step_has_no_checkpoint(either: Guarded, events: Events) -> None:
    """The call is not marked as finished."""
    either.make_non_finite()
    either.trainer.state.global_step = 7
    assert either.saver.finish() is None
    assert either.trainer.seen == []
    assert len(named(events, "checkpoint_rejected")) == 1


def test_the_output_directory_contains_what_the_script_saved(staged: Guarded, tmp_path: Path) -> None:
    """A snapshot lies in a folder of its own until a newer checkpoint is on disk."""
    staged.save(5)
    staged.drain()
    staged.step(6)
    assert staged.drain() == tmp_path / "out" / "_grpo_run" / "run-1" / "call-1" / "snapshot-6"
    assert sorted(os.listdir(tmp_path / "out")) == ["_grpo_run", "checkpoint-5"]
    staged.save(7)
    staged.drain()
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-5", "checkpoint-7"]
