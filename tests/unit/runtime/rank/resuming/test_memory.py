"""A trainer loads from a snapshot in memory what it would load from the checkpoint's files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from support.slots import held
from support.snapshots import TAKEN, SnapshotTrainer, take

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.resuming import memory
from grpo_run.runtime.rank.resuming.memory import OpenSnapshot
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.snapshots._drain_messages import DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import SnapshotName, StagingSlot


@pytest.fixture
def staging(tmp_path: Path) -> StagingArea:
    return StagingArea(tmp_path / "memory")


@pytest.fixture
def trainer(tmp_path: Path) -> SnapshotTrainer:
    return SnapshotTrainer(tmp_path / "out")


@pytest.fixture
def snapshots(session: Any, staging: StagingArea) -> Snapshots:
    return Snapshots(session, staging)


@pytest.fixture
def full(snapshots: Snapshots, trainer: SnapshotTrainer) -> StagingSlot:
    """The slot with the snapshot."""
    assert take(snapshots, trainer) == TAKEN
    assert snapshots.last is not None
    return snapshots.last[0]


def name_of(full: StagingSlot) -> SnapshotName:
    staged = full.read_snapshot()
    assert staged is not None
    return SnapshotName(slot=full.index, order=staged.order)


@pytest.fixture
def opened(staging: StagingArea, full: StagingSlot) -> Iterator[OpenSnapshot]:
    """The snapshot, open."""
    made = OpenSnapshot(staging, name_of(full))
    yield made
    made.close()


def test_the_libraries_load_what_was_saved(opened: OpenSnapshot, trainer: SnapshotTrainer) -> None:
    """Also with a mapped file, which needs a real one."""
    folder = opened.checkpoint.path
    assert folder.name == "checkpoint-5"
    assert torch.equal(safetensors.torch.load_file(folder / "model.safetensors")["weight"], trainer.weights)
    for mmap in (False, True):
        loaded = torch.load(folder / "optimizer.pt", map_location="cpu", mmap=mmap, weights_only=True)
        assert torch.equal(loaded["step"], trainer.weights)


def test_no_tensor_changes_when_the_slot_is_written_again(
    opened: OpenSnapshot, snapshots: Snapshots, full: StagingSlot, trainer: SnapshotTrainer
) -> None:
    """safetensors maps its file, and a script may keep the tensors."""
    kept = safetensors.torch.load_file(opened.checkpoint.path / "model.safetensors")["weight"]
    expected = trainer.weights.clone()
    opened.close()
    trainer.weights = torch.zeros(1000)
    for step in (6, 7, 8):
        full.mark_drained()
        assert take(snapshots, trainer, step, scheduled=False) == TAKEN
    staged = full.read_snapshot()
    assert staged is not None
    assert staged.step > 5
    assert torch.equal(kept, expected)


def test_the_drain_worker_writes_while_ranks_load(
    staging: StagingArea, full: StagingSlot, opened: OpenSnapshot
) -> None:
    """Both read the slot at the same time, and no rank may write it."""
    assert isinstance(
        handle_request(staging, DrainRequest(slot=full.index), lambda written: None), DrainPublished
    )
    assert full.busy
    assert staging.choose_slot() != full
    opened.close()
    assert not full.busy


@pytest.mark.parametrize(
    "damage",
    [
        lambda slot: (slot.files / "checkpoint-5/model.safetensors").unlink(),
        lambda slot: os.truncate(slot.files / "checkpoint-5/optimizer.pt", 100),
        lambda slot: slot.begin_snapshot(),
        lambda slot: (slot.path / "STAGED.json").write_text("{"),
    ],
    ids=["no file", "truncated file", "being written", "damaged record"],
)
def test_a_damaged_snapshot_is_not_opened(
    staging: StagingArea, full: StagingSlot, damage: Callable[[StagingSlot], None]
) -> None:
    """It was complete when the supervisor named it, and is checked again before anything is loaded."""
    name = name_of(full)
    damage(full)
    with pytest.raises(CheckpointError):
        OpenSnapshot(staging, name)
    assert not full.busy


def test_another_snapshot_in_the_slot_is_not_opened(staging: StagingArea, full: StagingSlot) -> None:
    """The slot was written again since the supervisor looked."""
    name = name_of(full)
    with pytest.raises(CheckpointError, match="no longer holds"):
        OpenSnapshot(staging, name.model_copy(update={"order": (0, 1, 4, 1000.0)}))


def test_a_slot_that_is_being_written_is_not_opened(
    staging: StagingArea, full: StagingSlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer holds its lock alone."""
    monkeypatch.setattr(memory, "LOCK_WAIT_SECONDS", 0.0)
    with held(full), pytest.raises(CheckpointError, match="being written"):
        OpenSnapshot(staging, name_of(full))
