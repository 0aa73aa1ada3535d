"""Before a restart, and at the end, the newest snapshot reaches the disk, or else memory."""

from __future__ import annotations

import os
import shutil

import pytest
from support.builders.runtime.draining_run import FULL, World

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.snapshots.drain_messages import DrainProgress
from grpo_run.runtime.snapshots.drain_requests import STALL_SECONDS


def test_before_a_restart_the_newest_snapshot_is_drained_first(world: World) -> None:
    """Even if it is not scheduled; scheduled ones follow while training continues."""
    world.take(0, 5)
    world.take(1, 9, scheduled=False)
    world.take(2, 7, scheduled=False)
    world.scheduler.flush(restore=True)
    assert world.slots == [1]
    assert world.durable == ["snapshot-9"]
    world.poll()
    world.poll()
    world.poll()
    assert world.slots == [1, 0]
    assert world.durable == ["checkpoint-5", "snapshot-9"]
    assert not world.staging.restore.exists()


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
    world.scheduler.flush(restore=True)
    assert world.slots == [0]
    assert world.durable == ["checkpoint-5"]


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_before_a_restart_the_newest_snapshot_is_restored_in_memory_if_the_disk_fails(
    world: World, disk: str
) -> None:
    """The next attempt resumes from it."""
    world.replies = getattr(world, disk)
    world.take(0, 5)
    world.take(1, 9, scheduled=False)
    before = world.now
    world.scheduler.flush(restore=True)
    path = world.staging.restore / "checkpoint-9"
    verify_digests(path, read_manifest(path).files)
    assert world.durable == []
    assert world.trouble
    assert [fields["durable"] for fields in world.named("checkpoint_published")] == [False]
    assert world.now - before < 4 * STALL_SECONDS
    assert world.scheduler.busy is False


@pytest.mark.parametrize("disk", ["full", "hangs"])
def test_at_the_end_nothing_is_restored_in_memory(world: World, disk: str) -> None:
    """The snapshot stays in its slot."""
    world.replies = getattr(world, disk)
    world.take(1, 9)
    world.scheduler.flush(restore=False)
    assert not world.staging.restore.exists()
    assert world.scheduler.close()
    assert world.staging.snapshots()


def test_a_stuck_worker_is_killed_before_a_restart(world: World) -> None:
    """Another worker restores in memory."""
    world.replies = world.hangs
    world.take(0, 9)
    world.poll()
    world.processes[0].stubborn = True
    world.scheduler.flush(restore=True)
    assert world.processes[0].killed
    assert len(world.processes) >= 2
    assert (world.staging.restore / "checkpoint-9").is_dir()


def test_a_snapshot_is_restored_only_once(world: World) -> None:
    """A second failure before the next snapshot."""
    world.replies = world.full
    world.take(0, 9)
    world.scheduler.flush(restore=True)
    asked = len(world.requests)
    world.scheduler.flush(restore=True)
    assert len(world.requests) == asked


@pytest.mark.parametrize("later", [{"attempt": 1}, {"ordinal": 2}])
def test_another_snapshot_of_the_same_step_replaces_the_restored_one(
    world: World, later: dict[str, int]
) -> None:
    """It is of a later attempt or call."""
    world.replies = world.full
    world.take(0, 9)
    world.scheduler.flush(restore=True)
    staged = world.take(1, 9, **later)
    world.scheduler.flush(restore=True)
    manifest = read_manifest(world.staging.restore / "checkpoint-9")
    assert manifest.train_call == staged.train_call
    assert [request.slot for request in world.requests if request.restore] == [0, 1]


def test_an_older_restored_checkpoint_is_deleted(world: World) -> None:
    """Memory holds one at a time."""
    world.replies = world.full
    world.take(0, 8)
    world.scheduler.flush(restore=True)
    world.take(1, 9)
    world.scheduler.flush(restore=True)
    assert os.listdir(world.staging.restore) == ["checkpoint-9"]


def test_flushing_gives_up_if_disk_and_memory_fail(world: World) -> None:
    """The restart continues without the snapshot."""
    world.replies = lambda request: [FULL]
    world.take(0, 5)
    world.take(1, 9)
    world.scheduler.flush(restore=True)
    assert len(world.requests) <= 4
    assert not world.scheduler.busy


def test_if_the_newest_snapshot_is_broken_the_next_one_is_drained(world: World) -> None:
    """The disk is not reported as failing."""
    world.take(0, 5)
    world.take(1, 9)
    shutil.rmtree(world.staging.slots[1].files)
    world.scheduler.flush(restore=True)
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
    world.scheduler.flush(restore=True)
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
    world.scheduler.flush(restore=False)
    assert world.durable == ["checkpoint-9"]
    assert world.warnings == []


def test_a_stall_alert_states_the_time_without_progress(world: World) -> None:
    """The time is in seconds."""
    world.replies = world.hangs
    world.take(0, 9)
    world.scheduler.flush(restore=False)
    assert f"has made no progress for {STALL_SECONDS:.0f} s" in world.warnings[0]


def test_a_worker_stopped_during_a_request_loses_only_the_request(world: World) -> None:
    """The supervisor continues."""
    world.replies = lambda request: []
    world.take(0, 9)
    world.poll()
    world.scheduler.worker.stop(0.0)
    world.poll()
    assert not world.scheduler.busy
    assert "drain worker died" in world.warnings[0]
