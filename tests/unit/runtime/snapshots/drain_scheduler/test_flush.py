"""Before a restart, and at the end, the newest snapshot reaches the disk.

Memory is freed unless it has the only copy.
"""

from __future__ import annotations

import shutil

import pytest
from support.builders.runtime.draining_run import World

from grpo_run.runtime.snapshots._drain_messages import DrainProgress
from grpo_run.runtime.snapshots._drain_requests import STALL_SECONDS


def test_before_a_restart_the_newest_snapshot_is_drained_first(world: World) -> None:
    """Even if it is not scheduled; scheduled ones follow while training continues."""
    world.take(0, 5)
    world.take(1, 9, scheduled=False)
    world.take(2, 7, scheduled=False)
    world.scheduler.flush(newest_only=True)
    assert world.slots == [1]
    assert world.durable == ["snapshot-9"]
    world.poll(times=3)
    assert world.slots == [1, 0]
    assert world.durable == ["checkpoint-5", "snapshot-9"]


def test_flushing_waits_for_the_request_in_progress(world: World) -> None:
    """It is not sent again."""
    replies = iter([[DrainProgress(written_bytes=1)]])
    world.replies = lambda request: next(replies, [])
    world.take(0, 5)
    world.poll()
    world.replies = world.drain
    request = world.requests[0]
    world.send_reply(DrainProgress(written_bytes=2))
    world.send_reply(world.drain(request)[0])
    world.scheduler.flush(newest_only=True)
    assert world.slots == [0]
    assert world.durable == ["checkpoint-5"]


@pytest.mark.parametrize("disk", ["full", "hangs"])
@pytest.mark.parametrize("newest_only", [False, True])
def test_a_snapshot_that_the_disk_does_not_take_stays_in_its_slot(
    world: World, disk: str, newest_only: bool
) -> None:
    """The next attempt loads it from memory, and at the end it is kept there."""
    world.replies = getattr(world, disk)
    world.take(0, 5)
    world.take(1, 9, scheduled=False)
    before = world.now
    world.scheduler.flush(newest_only=newest_only)
    assert world.durable == []
    assert world.trouble
    assert world.now - before < 4 * STALL_SECONDS
    assert world.scheduler.busy is False
    assert len(world.staging.snapshots()) == 2
    assert world.scheduler.close()


def test_a_stuck_worker_is_killed_before_a_restart(world: World) -> None:
    """Another worker is started for the next request."""
    world.replies = world.hangs
    world.take(0, 9)
    world.poll()
    world.processes[0].stubborn = True
    world.scheduler.flush(newest_only=True)
    assert world.processes[0].killed


def test_if_the_newest_snapshot_is_broken_the_next_one_is_drained(world: World) -> None:
    """The disk is not reported as failing."""
    world.take(0, 5)
    world.take(1, 9)
    shutil.rmtree(world.staging.slots[1].files)
    world.scheduler.flush(newest_only=True)
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble


def test_flushing_waits_while_the_disk_makes_progress(world: World) -> None:
    """Giving up would lose what is already written."""
    world.replies = lambda request: []
    world.take(0, 9)
    polls = [0]
    poll = world._poll

    def slow(seconds: float) -> bool:
        polls[0] += 1
        world.now += STALL_SECONDS - 1.0
        world.send_reply(
            DrainProgress(written_bytes=polls[0]) if polls[0] < 100 else world.drain(world.requests[0])[0]
        )
        return poll(seconds)

    world._poll = slow  # type: ignore[method-assign]
    world.scheduler.flush(newest_only=True)
    assert world.durable == ["checkpoint-9"]
    assert world.warnings == []


def test_a_reply_that_came_while_the_supervisor_was_suspended_counts(world: World) -> None:
    """The request was carried out long ago; it must not be given up."""
    world.replies = lambda request: []
    world.take(0, 9)
    poll, polls = world._poll, [0]

    def suspended(seconds: float) -> bool:
        polls[0] += 1
        if polls[0] == 2:
            world.send_reply(world.drain(world.requests[0])[0])
            world.now += 10 * STALL_SECONDS
            return False  # it has looked a moment before
        return poll(seconds)

    world._poll = suspended  # type: ignore[method-assign]
    world.scheduler.flush(newest_only=False)
    assert world.durable == ["checkpoint-9"]
    assert world.warnings == []


def test_a_stall_alert_states_the_time_without_progress(world: World) -> None:
    """The time is in seconds."""
    world.replies = world.hangs
    world.take(0, 9)
    world.scheduler.flush(newest_only=False)
    assert f"has made no progress for {STALL_SECONDS:.0f} s" in world.warnings[0]


@pytest.mark.parametrize("entry", [(), (0, 5), (0, 4)])
def test_closing_frees_the_memory_when_every_snapshot_is_done(world: World, entry: tuple[int, ...]) -> None:
    """Superseded snapshots need not be on disk, broken ones cannot be, and there may have been none."""
    if entry == (0, 5):
        world.take(0, 5)
        world.take(1, 4, scheduled=False)
    elif entry:
        world.take(0, 4)
        shutil.rmtree(world.staging.slots[0].files)
    world.scheduler.flush(newest_only=False)
    world.scheduler.close()
    assert not world.staging.path.exists()
    assert all(not process.alive for process in world.processes)


@pytest.mark.parametrize("scheduled", [True, False])
def test_closing_keeps_the_memory_of_an_undrained_newest_snapshot(world: World, scheduled: bool) -> None:
    """The run may be resumed from it."""
    world.take(0, 9, scheduled=scheduled)
    assert world.scheduler.close()
    assert [staged.step for staged, _ in world.staging.snapshots()] == [9]


def test_closing_keeps_the_memory_of_an_undrained_scheduled_snapshot(world: World) -> None:
    """A newer one on disk does not replace it."""
    world.take(0, 5)
    world.take(1, 9)
    world.staging.slots[1].mark_drained()
    world.scheduler.close()
    assert world.staging.snapshots()
