"""What a host does with its memory in a run over several: only that of rank 0 writes checkpoints to disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.draining_run import World
from support.slots import fill, snapshot

from grpo_run.runtime.checkpoints.digests import FileEntry
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.parts import Parts, entries, read_parts, record_parts
from grpo_run.runtime.snapshots.slot import StagingSlot


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that has just started."""
    return World(tmp_path, monkeypatch)


@pytest.fixture
def take_part(out: Path) -> Callable[..., Parts]:
    """Take part 0 of a snapshot of two hosts."""

    def take(slot: StagingSlot, step: int) -> Parts:
        staged = snapshot(out, step)
        slot.begin_snapshot()
        (slot.files / staged.folder).mkdir()
        (slot.files / staged.folder / "model").write_bytes(b"1" * step)
        slot.prepare_snapshot(staged)
        parts = Parts(staged=staged, hosts=2, files={0: entries({"model": step})})
        record_parts(slot, parts)
        return parts

    return take


def test_another_host_than_that_of_rank_0_writes_nothing(world: World) -> None:
    """Neither while ranks train nor before they start again, nor at the end, when it frees its memory."""
    world.take(0, 5)
    for _ in range(2):
        assert world.scheduler.prepare_attempt(host=1, hosts=2) is None
    world.poll(times=5)
    world.scheduler.flush(newest_only=False)
    assert world.requests == []
    assert not world.scheduler.unwritten()
    assert not world.scheduler.close()
    assert not world.staging.path.exists()


def test_it_writes_when_it_has_rank_0(world: World) -> None:
    """Hosts may be numbered in another way in the next attempt."""
    world.take(0, 5)
    world.scheduler.prepare_attempt(host=1, hosts=2)
    world.scheduler.prepare_attempt(host=0, hosts=2)
    world.poll(times=2)
    assert [request.slot for request in world.requests] == [0]


def test_memory_stays_if_the_host_of_rank_0_is_missing(world: World) -> None:
    """The same commands go on from it."""
    world.take(0, 5)
    world.scheduler.prepare_attempt(host=1, hosts=2)
    world.scheduler.keeps_parts = True
    assert world.scheduler.close()
    assert world.staging.snapshots()


def test_what_ranks_could_not_load_from_memory_is_loaded_from_disk(world: World) -> None:
    """Also if the ranks have completed the snapshot themselves, so that it was not offered to them."""
    assert world.scheduler.prepare_attempt(host=0, hosts=2) is None
    world.take(0, 5)
    world.staging.slots[0].mark_loaded()
    assert world.scheduler.prepare_attempt(host=0, hosts=2) is None
    assert world.scheduler.loads_from_disk
    world.poll()  # a step is finished
    assert world.scheduler.prepare_attempt(host=0, hosts=2) is not None
    assert not world.scheduler.loads_from_disk


def test_the_newest_parts_are_not_freed(staging: StagingArea, take_part: Callable[..., Parts]) -> None:
    """Of three, the oldest is not needed: the one after it is everywhere before the newest is taken."""
    for slot, step in zip(staging.slots, (6, 5, 7), strict=True):
        take_part(slot, step)
    staging.free_unneeded(lambda staged, slot: True)
    left = [read_parts(slot) for slot in staging.slots]
    assert [parts.staged.step for parts in left if parts is not None] == [6, 7]


def test_a_snapshot_is_complete_with_its_last_part(
    staging: StagingArea, take_part: Callable[..., Parts]
) -> None:
    """Not before, and then with the files of all."""
    slot = staging.slots[0]
    parts = take_part(slot, 5)
    assert slot.read_snapshot() is None
    (slot.files / "checkpoint-5" / "rank1").write_bytes(b"123")
    record_parts(slot, parts.with_part(1, {"rank1": FileEntry(size=3, blake3="")}))
    staged: Any = slot.read_snapshot()
    assert staged.files == {"model": 5, "rank1": 3}
    slot.begin_snapshot()
    assert read_parts(slot) is None


def test_a_snapshot_of_an_earlier_version_is_not_read(
    staging: StagingArea, take_part: Callable[..., Parts]
) -> None:
    """Its trainer's state has no log history."""
    slot = staging.slots[0]
    parts = take_part(slot, 5)
    earlier = parts.staged.model_copy(update={"schema_version": 1})
    record_parts(slot, parts.model_copy(update={"staged": earlier}))
    assert read_parts(slot) is None


def test_a_snapshot_of_one_host_is_a_single_part(staging: StagingArea, out: Path) -> None:
    """The next attempt may have more hosts."""
    staged = fill(staging.slots[0], snapshot(out))
    parts = read_parts(staging.slots[0])
    assert parts is not None
    assert (parts.hosts, set(parts.files[0])) == (1, set(staged.files or ()))
