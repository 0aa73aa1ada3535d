"""A full, stuck or failing disk raises one alert, and costs no snapshot."""

from __future__ import annotations

import shutil

import pytest
from support.builders.runtime.draining_run import DIES, FULL, World

from grpo_run.runtime.history.events import CheckpointPublished
from grpo_run.runtime.snapshots._drain_messages import DrainFailed, DrainProgress
from grpo_run.runtime.snapshots._drain_requests import RETRY_SECONDS, STALL_SECONDS
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.watchdog.causes import Cause


def test_a_full_disk_raises_one_alert_and_is_retried(world: World) -> None:
    """Ranks do not wait for the disk until a checkpoint is written again."""
    frees = iter(range(10, 1000))
    world.replies = lambda request: [
        DrainFailed(slot=0, step=5, reason=f"{next(frees)} MiB may be taken", full=True)
    ]
    world.take(0, 5)
    world.poll(times=2)
    assert world.trouble
    assert len(world.warnings) == 1
    assert "full" in world.warnings[0]
    assert f"{world.out}/checkpoint-5" in world.warnings[0]
    assert [(fields["cause"], fields["step"]) for fields in world.named("checkpoint_failed")] == [
        ("disk_full", 5)
    ]
    for _ in range(3):
        world.poll(RETRY_SECONDS - 1.0)
        world.poll(1.0)
        world.poll()
    assert 3 <= len(world.requests) <= 5
    assert len(world.warnings) == 1, "one alert per cause, even if the reason changes"
    world.replies = world.drain
    world.poll(RETRY_SECONDS)
    world.poll()
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble
    assert len(world.warnings) == 2
    assert "again" in world.warnings[1]


def test_another_cause_raises_another_alert(world: World) -> None:
    """The user must act differently."""
    world.replies = lambda request: [FULL]
    world.take(0, 5)
    world.poll(times=2)
    world.replies = lambda request: [DrainFailed(slot=0, step=5, reason="Read-only file system", full=False)]
    world.poll(RETRY_SECONDS)
    world.poll()
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["disk_full", "unknown"]
    assert "Read-only" in world.warnings[-1]


def test_a_stall_raises_one_alert_and_the_request_continues(world: World) -> None:
    """Training continues, the worker is not killed, and the checkpoint is written in the end."""
    world.replies = lambda request: []
    world.take(0, 5)
    world.poll()
    world.poll(STALL_SECONDS)
    assert world.warnings == []
    for _ in range(5):
        world.poll(STALL_SECONDS)
    assert len(world.warnings) == 1
    assert "has made no progress" in world.warnings[0]
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["checkpoint_stall"]
    assert world.trouble
    assert not world.processes[0].killed
    assert len(world.requests) == 1
    world.send_reply(world.drain(world.requests[0])[0])
    world.poll()
    assert not world.trouble
    assert world.durable == ["checkpoint-5"]


def test_ranks_see_trouble_after_it_is_in_the_journal(world: World) -> None:
    """A rank that sees it may discard a checkpoint, which the journal then shows as its consequence."""
    seen: list[Cause | None] = []
    world.scheduler = DrainScheduler(
        world.staging,
        write=lambda event: seen.append(world.trouble),
        warn=world.warnings.append,
        preloaded=False,
        clock=lambda: world.now,
    )
    world.replies = lambda request: [FULL]
    world.take(0, 5)
    world.poll(times=2)
    assert seen == [None]
    assert world.trouble is Cause.disk_full


def test_a_job_that_was_suspended_has_not_stalled(world: World) -> None:
    """Neither the worker nor the disk could make progress. A stall after it is seen as late as ever."""
    world.replies = lambda request: []
    world.take(0, 5)
    world.poll()
    for _ in range(3):
        world.suspend(10 * STALL_SECONDS)
        world.poll(STALL_SECONDS / 4)
    assert world.warnings == []
    world.poll(STALL_SECONDS)
    assert len(world.warnings) == 1


def test_a_slow_disk_is_not_a_stall(world: World) -> None:
    """The disk writes bytes all the time."""
    world.replies = lambda request: []
    world.take(0, 5)
    world.poll()
    for written in range(10):
        world.send_reply(DrainProgress(written_bytes=written))
        world.poll(STALL_SECONDS - 1.0)
    assert world.warnings == []
    assert not world.trouble


@pytest.mark.parametrize("end", [DIES, ConnectionResetError(104, "Connection reset by peer")])
def test_a_worker_that_dies_is_replaced(world: World, end: BaseException) -> None:
    """An alert is raised, because the cause may persist."""
    world.replies = lambda request: [end]
    world.take(0, 5)
    world.poll(times=2)
    assert not world.scheduler.busy
    assert world.trouble, "ranks must not wait for the disk"
    assert "died" in world.warnings[0]
    world.replies = world.drain
    world.poll(RETRY_SECONDS)
    world.poll()
    assert len(world.processes) == 2
    assert world.durable == ["checkpoint-5"]
    assert not world.trouble


def test_an_idle_worker_that_dies_is_replaced_without_an_alert(world: World) -> None:
    """No work was lost."""
    world.take(0, 5)
    world.poll(times=2)
    world.processes[0].alive = False
    world.take(1, 6)
    world.poll(times=2)
    assert len(world.processes) == 2
    assert world.durable == ["checkpoint-5", "checkpoint-6"]
    assert world.warnings == []


def test_a_worker_that_cannot_be_started_raises_an_alert(world: World) -> None:
    """The start is retried later."""
    world.refuses_to_start = OSError(12, "Cannot allocate memory")
    world.take(0, 5)
    world.poll()
    assert "Cannot allocate memory" in world.warnings[0]
    assert world.trouble
    world.refuses_to_start = None
    world.poll(RETRY_SECONDS)
    world.poll()
    assert world.durable == ["checkpoint-5"]


def test_a_slot_reused_by_a_rank_raises_no_alert(world: World) -> None:
    """The disk is not at fault."""
    world.replies = lambda request: [DrainFailed(slot=0, step=None, reason="the slot is empty", full=False)]
    world.take(0, 5)
    world.poll(times=2)
    assert world.warnings == []
    assert not world.trouble


def test_a_broken_snapshot_is_skipped(world: World) -> None:
    """With an alert that does not blame the disk; a new snapshot in its slot is drained."""
    world.take(0, 5)
    world.take(1, 6)
    shutil.rmtree(world.staging.slots[0].files)
    world.poll(times=6)
    assert world.durable == ["checkpoint-6"]
    assert world.slots == [0, 1]
    assert not world.trouble
    assert len(world.warnings) == 1
    assert "cannot be read" in world.warnings[0]
    assert [fields["cause"] for fields in world.named("checkpoint_failed")] == ["checkpoint_corrupt"]
    world.take(0, 7)
    world.poll(times=2)
    assert "checkpoint-7" in world.durable, "a later snapshot in the same slot is drained"


def test_broken_snapshots_leave_their_slots_to_the_ranks(world: World) -> None:
    """Nothing waits for them to reach the disk."""
    for index in range(3):
        world.take(index, index + 4)
        shutil.rmtree(world.staging.slots[index].files)
    assert world.staging.choose_slot() is None
    world.poll(times=4)
    assert [fields["lost"] for fields in world.named("checkpoint_failed")] == [True] * 3
    assert world.staging.snapshots() == []
    assert world.staging.choose_slot() is not None
    assert world.scheduler.unwritten() == []


@pytest.mark.parametrize("by_rank", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_broken_snapshot_is_not_missed_if_its_step_was_taken_again_and_written(
    world: World, *, again: bool, by_rank: bool
) -> None:
    """By a later attempt, from memory or directly; one written before it was taken is another state."""
    world.take(0, 8, staged_at=1000.0)
    shutil.rmtree(world.staging.slots[0].files)
    other = 1005.0 if again else 995.0
    if by_rank:
        published = CheckpointPublished(train_call=1, step=8, path="p", time=other, scheduled=True)
        world.scheduler.note_published(published)
    else:
        world.take(1, 8, attempt=1, staged_at=other)
        world.scheduler.flush(newest_only=True)  # the newest first, as after a restart
    world.poll(times=2)
    (failed,) = world.named("checkpoint_failed")
    assert failed["lost"] is not again
    assert ("was written by a later attempt" in failed["reason"]) is again


def test_trouble_of_an_earlier_supervisor_is_cleared(world: World) -> None:
    """The new one tests the disk itself."""
    world.staging.set_trouble(Cause.disk_full, "the disk is full")
    world.begin()
    assert not world.trouble
