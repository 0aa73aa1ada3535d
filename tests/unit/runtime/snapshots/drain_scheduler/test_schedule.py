"""Which snapshots are drained while ranks train, and when: scheduled ones first, and nothing that is on
disk.
"""

from __future__ import annotations

import pytest
from support.builders.runtime.draining_run import World

from grpo_run.runtime.snapshots.drain_scheduler import DURABLE_SECONDS, POLL_SECONDS

# ---- while training ----


def test_without_snapshots_no_worker_is_started(world: World) -> None:
    """Repeated polls do not start one."""
    world.poll(times=5)
    assert world.processes == []


def test_scheduled_snapshots_are_drained_oldest_first(world: World) -> None:
    """One worker drains them, with one event per checkpoint."""
    world.take(0, 10)
    world.take(1, 5)
    world.take(2, 12, scheduled=False)
    world.poll(times=6)
    assert world.slots == [1, 0]
    assert world.durable == ["checkpoint-10", "checkpoint-5"]
    assert len(world.processes) == 1
    published = world.named("checkpoint_published")
    assert [(fields["step"], fields["verified"]) for fields in published] == [(5, True), (10, True)]
    assert published[0]["path"] == str(world.out / "checkpoint-5")
    assert world.warnings == []
    assert not world.trouble


def test_the_newest_recovery_snapshot_is_drained_when_the_last_checkpoint_is_too_old(world: World) -> None:
    """Memory does not survive the machine."""
    world.take(0, 5, scheduled=False)
    world.take(1, 6, scheduled=False)
    world.poll(DURABLE_SECONDS - 1.0)
    assert world.requests == []
    world.poll(1.0)
    world.poll()
    assert world.durable == ["snapshot-6"]
    world.take(0, 7, scheduled=False)
    world.poll(DURABLE_SECONDS - 1.0)
    assert world.durable == ["snapshot-6"]
    world.poll(1.0)
    world.poll()
    assert world.durable == ["snapshot-7"], "the superseded one is deleted"


def test_one_request_is_in_progress_at_a_time(world: World) -> None:
    """Polling does not block."""
    world.replies = lambda request: []
    world.take(0, 5)
    world.take(1, 6)
    before = world.now
    for _ in range(5):
        world.scheduler.poll()
    assert world.now == before
    world.poll()
    assert world.slots == [0]
    assert world.scheduler.busy


def test_the_slots_are_read_at_most_once_per_poll_interval(world: World) -> None:
    """The supervisor polls more often."""
    world.poll()
    world.take(0, 5)
    world.poll(POLL_SECONDS / 2)
    assert world.requests == []
    world.poll(POLL_SECONDS / 2)
    assert world.slots == [0]


# ---- checkpoints that ranks wrote themselves ----


def test_a_recovery_snapshot_older_than_a_checkpoint_on_disk_is_not_drained(world: World) -> None:
    """The memory is freed at the end."""
    world.take(0, 5, scheduled=False)
    world.scheduler.record_published(1, 6)
    world.poll(DURABLE_SECONDS)
    world.scheduler.flush(newest_only=True)
    world.scheduler.flush(newest_only=False)
    assert world.requests == []
    world.scheduler.close()
    assert not world.staging.path.exists()


@pytest.mark.parametrize(
    ("call", "step", "later"),
    [(1, 4, 0.0), (2, 9, 0.0), (1, 9, -10.0)],
    ids=["older", "other call", "went back"],
)
def test_an_unrelated_checkpoint_on_disk_supersedes_nothing(
    world: World, call: int, step: int, later: float
) -> None:
    """Of an earlier step, of another call, or from before the run resumed."""
    staged = world.take(0, 5, scheduled=False)
    world.scheduler.record_published(call, step, taken_at=staged.staged_at + later)
    world.scheduler.flush(newest_only=True)
    assert world.durable == ["snapshot-5"]


def test_a_scheduled_snapshot_is_drained_even_if_a_newer_checkpoint_exists(world: World) -> None:
    """The script asked for it."""
    world.take(0, 5)
    world.scheduler.record_published(1, 9)
    world.poll(times=2)
    assert world.durable == ["checkpoint-5"]
