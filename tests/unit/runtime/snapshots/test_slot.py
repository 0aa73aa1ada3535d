"""One staging slot: its snapshot and its lock."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.slots import fill, held, snapshot, weights

from grpo_run.runtime import files
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import STAGED, StagingSlot


def test_a_completed_snapshot_is_read_back(staging: StagingArea) -> None:
    """Every field, also by a process that opens the area later. One that is only prepared is not complete."""
    staged = snapshot(OUT, 7, limit=2, best="checkpoint-3", scheduled=False)
    slot = staging.slots[1]
    slot.begin_snapshot()
    slot.prepare_snapshot(staged)
    assert slot.read_snapshot() is None
    slot.begin_snapshot()
    with pytest.raises(FileNotFoundError):
        slot.complete_snapshot()  # the next one discards what was prepared
    slot.prepare_snapshot(staged)
    slot.complete_snapshot()
    assert slot.read_snapshot() == staged
    assert StagingArea(staging.path).snapshots() == [(staged, slot)]


def test_a_slot_being_written_holds_no_snapshot(staging: StagingArea) -> None:
    """Its previous files are deleted, and it is not drained."""
    slot = staging.slots[0]
    fill(slot, snapshot(OUT, 5))
    slot.mark_drained()
    assert slot.drained
    assert staging.snapshots()
    slot.begin_snapshot()
    assert slot.read_snapshot() is None
    assert not slot.drained
    assert staging.snapshots() == []
    assert list(slot.files.iterdir()) == []


OUT = Path("/out")
VALID = json.loads(snapshot(OUT).model_dump_json())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        json.dumps(VALID | {"step": "many"}).encode(),
        json.dumps(VALID | {"train_call": None}).encode(),
        json.dumps(VALID | {"schema_version": 2}).encode(),
        json.dumps(VALID).encode()[:-20],
    ],
)
def test_an_unreadable_snapshot_is_skipped(staging: StagingArea, content: bytes) -> None:
    """Reading the slot raises an error that names the file, and the slot can be written again."""
    slot = staging.slots[0]
    (slot.path / STAGED).write_bytes(content)
    with pytest.raises(CheckpointError, match=STAGED):
        slot.read_snapshot()
    assert staging.snapshots() == []
    assert staging.choose_slot() == slot


def test_unknown_fields_are_accepted(staging: StagingArea) -> None:
    """A later release may add fields."""
    (staging.slots[0].path / STAGED).write_text(json.dumps(VALID | {"more": 1}))
    assert staging.slots[0].read_snapshot() == snapshot(OUT)


def test_a_slot_lock_is_exclusive(staging: StagingArea) -> None:
    """A second descriptor does not get it; other slots stay free."""
    slot = staging.slots[0]
    with slot.locked() as acquired, slot.locked() as other:
        assert (acquired, other) == (True, False)
        assert slot.busy
        assert not staging.slots[1].busy
    assert not slot.busy
    with held(slot):
        with slot.locked() as acquired:
            assert not acquired
        assert slot.busy, "a failed attempt does not release it"


def test_readers_of_a_slot_exclude_only_writers(staging: StagingArea) -> None:
    """Ranks load a snapshot while the drain worker writes it to disk; no rank may write the slot
    meanwhile.
    """
    slot = staging.slots[0]
    with slot.locked(shared=True) as loading, slot.locked(shared=True) as draining:
        assert (loading, draining) == (True, True)
        assert slot.busy
    with slot.locked(), slot.locked(shared=True) as acquired:
        assert acquired is False
    assert not slot.busy


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda slot: os.truncate(state(slot).with_name("model-1.safetensors"), 100), "has 100 bytes"),
        (lambda slot: state(slot).write_bytes(b""), "has 0 bytes"),
        (lambda slot: state(slot).unlink(), r"trainer_state.json cannot be read: No such file"),
        (lambda slot: shutil.rmtree(slot.files), r"checkpoint-5 cannot be read"),
    ],
)
def test_a_snapshot_that_lacks_something_is_not_complete(
    staging: StagingArea, damage: Callable[[StagingSlot], None], problem: str
) -> None:
    """Every file's size is checked before ranks load it and before it is written to disk."""
    slot = staging.slots[0]
    staged = fill(slot, snapshot(OUT, world_size=2), recorded=True)
    slot.check_complete(staged)
    damage(slot)
    with pytest.raises(CheckpointError, match=problem):
        slot.check_complete(staged)


def test_the_next_snapshot_gets_the_files_of_the_last(staging: StagingArea) -> None:
    """They are kept until it is complete, so that it can be written over them."""
    slot = staging.slots[0]
    fill(slot, snapshot(OUT, 5))
    slot.begin_snapshot()
    assert (slot.spare / "optimizer/rank0.pt").read_bytes() == weights(0, 5)
    assert not (slot.spare / "trainer_state.json").exists(), "nothing is written over it"
    fill(slot, snapshot(OUT, 6))
    assert not slot.spare.exists()


def test_files_that_were_loaded_are_not_reused(staging: StagingArea) -> None:
    """A script may keep tensors that are mapped from them, as safetensors maps its files."""
    slot = staging.slots[0]
    fill(slot, snapshot(OUT, 5))
    slot.mark_loaded()
    slot.begin_snapshot()
    assert not slot.spare.exists()
    fill(slot, snapshot(OUT, 6))
    slot.begin_snapshot()
    assert slot.spare.exists()


def state(slot: StagingSlot) -> Path:
    return slot.files / "checkpoint-5" / "trainer_state.json"


def test_a_forked_child_does_not_keep_the_lock(staging: StagingArea) -> None:
    """Data loaders and reward functions may fork while the lock is held."""
    slot = staging.slots[0]
    wait, go = os.pipe()
    with slot.locked() as acquired:
        assert acquired
        child = os.fork()
        if child == 0:
            os.close(go)
            os.read(wait, 1)
            os._exit(0)
    busy = slot.busy
    os.close(go)
    os.waitpid(child, 0)
    os.close(wait)
    assert not busy


def test_locking_waits_until_the_deadline(staging: StagingArea, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is acquired as soon as it is free."""
    slot, now = staging.slots[0], [0.0]
    stack = ExitStack()

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 2.0:
            stack.close()

    monkeypatch.setattr(files, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    stack.enter_context(held(slot))
    with slot.locked(wait_seconds=1.0) as acquired:
        assert not acquired
    assert 1.0 <= now[0] < 1.1
    with slot.locked(wait_seconds=10.0) as acquired:
        assert acquired
    assert 2.0 < now[0] < 2.1
