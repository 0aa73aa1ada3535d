"""A snapshot that cannot be read is broken, and one that the disk did not return is not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.drained_slots import drain_slot, expect_failed, expect_published, is_empty
from support.slots import fill, snapshot

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.snapshots import _drain_worker as drain_worker
from grpo_run.runtime.snapshots.area import StagingArea


@pytest.mark.parametrize("where", ["publish", "partial_directory"])
def test_a_read_error_of_the_disk_does_not_mark_the_snapshot_broken(
    staging: StagingArea, out: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A manifest that was just written cannot be read back; a retry succeeds."""
    fill(staging.slots[0], snapshot(out, 5))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError("no readable MANIFEST.json: Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(drain_worker, where, fail)
        reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.broken, reply.full) == (5, False, False)
    assert is_empty(out)
    expect_published(drain_slot(staging))


@pytest.mark.parametrize(
    "damage",
    [
        lambda slot: (slot.files / "checkpoint-5/model-0.safetensors").unlink(),
        lambda slot: os.truncate(slot.files / "checkpoint-5/optimizer/rank0.pt", 100),
        lambda slot: (slot.files / "checkpoint-5/trainer_state.json").write_text(""),
    ],
)
def test_an_unreadable_snapshot_is_broken(
    staging: StagingArea, out: Path, damage: Callable[[Any], None]
) -> None:
    """A retry cannot succeed; no files are visible."""
    fill(staging.slots[0], snapshot(out, 5))
    damage(staging.slots[0])
    reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.broken, reply.full) == (5, True, False)
    assert is_empty(out)
    assert not staging.slots[0].drained


def test_a_snapshot_with_missing_trainer_files_is_broken(staging: StagingArea, out: Path) -> None:
    """A checkpoint without them would still pass verification."""
    fill(staging.slots[0], snapshot(out, 5))
    shutil.rmtree(staging.slots[0].files)
    reply = expect_failed(drain_slot(staging))
    assert (reply.step, reply.broken) == (5, True)
    assert is_empty(out)


def test_an_invalid_snapshot_record_is_a_failure(staging: StagingArea, out: Path) -> None:
    """The reply is that of an empty slot."""
    (staging.slots[0].path / "STAGED.json").write_text("{")
    reply = expect_failed(drain_slot(staging))
    assert reply.step is None
    assert "STAGED.json" in reply.reason
