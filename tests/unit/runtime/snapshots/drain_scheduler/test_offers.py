"""A snapshot in memory is offered to the next attempt, until it is on disk or has failed there."""

from __future__ import annotations

import os

import pytest
from support.builders.runtime.draining_run import FULL, World

from grpo_run.runtime.snapshots.drain_scheduler import HOLD_SECONDS


def test_the_newest_snapshot_is_offered_to_an_attempt_and_drained_after_its_first_step(world: World) -> None:
    """Ranks start at once; nothing is written to disk while they load."""
    world.take(0, 5, layout="ddp")
    world.take(1, 9, scheduled=False, layout="ddp")
    offered = world.scheduler.prepare_attempt()
    assert offered is not None
    assert (offered.slot, offered.train_call, offered.order[2]) == (1, 1, 9)
    world.now += 10
    world.scheduler.poll(ranks_have_loaded=False)
    assert world.requests == []
    world.poll(times=4)
    assert world.durable == ["checkpoint-5", "snapshot-9"]


def test_an_attempt_that_is_to_spare_memory_loads_from_disk(world: World) -> None:
    """The newest snapshot is written first, and the memory of all that is on disk is free when the ranks
    start.
    """
    world.take(0, 5, layout="ddp")
    world.take(1, 9, scheduled=False, layout="ddp")
    assert world.scheduler.prepare_attempt(spare_memory=True) is None
    assert world.durable == ["snapshot-9"]
    assert [staged.step for staged, _ in world.staging.snapshots()] == [5]
    assert not list(world.staging.slots[1].path.rglob("*.pt"))


def test_a_disk_that_fails_leaves_the_only_copy_in_memory(world: World) -> None:
    """Sparing memory is no reason to lose steps."""
    world.replies = lambda request: [FULL]
    world.take(0, 9, layout="ddp")
    assert world.scheduler.prepare_attempt(spare_memory=True) is not None
    assert [staged.step for staged, _ in world.staging.snapshots()] == [9]


def test_short_memory_lets_the_newest_snapshot_be_drained_and_freed(world: World) -> None:
    """Otherwise it stays in memory only, until half an hour has passed."""
    world.take(0, 9, scheduled=False)
    world.poll(times=3)
    assert world.durable == []
    assert world.scheduler.free_memory() == 0
    world.scheduler.memory_is_short = True
    world.poll(times=3)
    assert world.durable == ["snapshot-9"]
    assert world.scheduler.free_memory() > 0


def test_drains_are_not_held_for_ever(world: World) -> None:
    """A script may prepare its data for hours before it trains."""
    world.take(0, 5, layout="ddp")
    world.scheduler.prepare_attempt()
    world.now += HOLD_SECONDS + 1
    world.scheduler.poll(ranks_have_loaded=False)
    assert world.slots == [0]


def test_a_snapshot_without_recorded_sizes_is_drained_first(world: World) -> None:
    """There was no memory to record them."""
    world.take(0, 5, recorded=False)
    assert world.scheduler.prepare_attempt() is None
    assert world.durable == ["checkpoint-5"]


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_a_snapshot_is_offered_again_if_the_disk_does_not_take_it(world: World, disk: str) -> None:
    """Memory has the only copy."""
    world.replies = getattr(world, disk)
    world.take(0, 5)
    for _ in range(3):
        assert world.scheduler.prepare_attempt() is not None


def test_a_snapshot_is_not_offered_again_to_the_attempt_after_one_without_a_step(world: World) -> None:
    """Whatever the reason was: the next attempt loads from disk, and so do all until a step is finished."""
    world.take(0, 5, layout="ddp")
    assert world.scheduler.prepare_attempt() is not None
    for _ in range(2):
        assert world.scheduler.prepare_attempt() is None
        assert world.durable == ["checkpoint-5"]
    world.poll()
    assert world.scheduler.prepare_attempt() is not None


def test_a_damaged_snapshot_is_not_offered(world: World) -> None:
    """It is reported as lost, and the next older one is offered."""
    world.take(0, 5, layout="ddp")
    world.take(1, 9, layout="ddp")
    os.truncate(world.staging.slots[1].files / "checkpoint-9/model-0.safetensors", 1)
    offered = world.scheduler.prepare_attempt()
    assert offered is not None
    assert offered.slot == 0
    assert "checkpoint-9 is lost, its snapshot in memory cannot be read" in world.warnings[0]


def test_a_snapshot_on_disk_is_offered_from_memory_unless_a_later_checkpoint_was_written(
    world: World,
) -> None:
    """Its digests need not be compared again. A rank may have written a later checkpoint itself."""
    world.take(0, 5, scheduled=False, layout="ddp")
    world.scheduler.flush(newest_only=True)
    assert world.scheduler.prepare_attempt() is not None
    world.poll()
    world.take(1, 7, scheduled=False, layout="ddp")
    world.scheduler.record_published(1, 8)
    assert world.scheduler.prepare_attempt() is None
