"""When snapshots are written to disk, and what is said about it; see the text file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.drain_shell import DrainShell
from support.builders.runtime.draining_run import World
from support.slots import snapshot
from support.transcripts import Story, stories

from grpo_run.runtime.event import Event
from grpo_run.runtime.snapshots._drain_messages import DrainProgress
from grpo_run.runtime.snapshots._drain_policy import within_limits
from grpo_run.runtime.snapshots._drain_requests import STALL_SECONDS
from grpo_run.runtime.snapshots._drain_worker import DrainProcess
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.slot import StagingSlot
from grpo_run.watchdog.causes import Cause


@stories(__file__, "drains.txt", "drain_worker.txt")
def test_drains(story: Story, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every story of these files."""
    story.check(DrainShell(tmp_path, monkeypatch), word)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that has just started, and a disk that hangs."""
    made = World(tmp_path, monkeypatch)
    made.replies = made.hangs
    return made


def test_ranks_see_trouble_after_it_is_in_the_journal(world: World) -> None:
    """A rank that sees it may discard a checkpoint, which the journal then shows as its consequence."""
    seen: list[Cause | None] = []

    def write(event: Event) -> None:
        seen.append(world.trouble)

    world.scheduler = DrainScheduler(
        world.staging, write=write, warn=world.warnings.append, preloaded=False, clock=lambda: world.now
    )
    world.replies = world.full
    world.take(0, 5)
    world.poll(times=2)
    assert seen == [None]
    assert world.trouble is Cause.disk_full


@pytest.mark.parametrize("ranks_run", [True, False])
def test_no_worker_is_started_with_another_forkserver_before_the_ranks_end_is_seen(
    ranks_run: bool, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have died with the last one, and the start of another takes seconds. A drain after their end
    starts it: the last checkpoint needs it.
    """
    monkeypatch.setattr(DrainProcess, "server_has_ended", True)
    world.replies = world.drain
    world.take(0, 5)
    if ranks_run:
        world.poll(times=5)
    else:
        world.scheduler.flush(newest_only=False)
    assert (len(world.requests), world.durable) == ((0, []) if ranks_run else (1, ["checkpoint-5"]))


def test_flushing_waits_while_the_disk_makes_progress(world: World) -> None:
    """Giving up would lose what is already written."""
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


def test_what_the_limit_would_delete_at_once_is_not_written_at_the_end() -> None:
    """The best checkpoint, those that the user asked for, and other snapshots are; a broken one does not
    count.
    """

    def steps(limit: int | None, *, broken: int = 0, **newest: Any) -> list[int]:
        changes: list[dict[str, Any]] = [newest, {}, {"scheduled": False}, {"kept": True}, {}, {}]
        found = [
            (
                snapshot(Path("/out"), 9 - index, limit=limit, **each),
                StagingSlot(index, Path(f"/slot{index}")),
            )
            for index, each in enumerate(changes)
        ]
        return [
            staged.step for staged, _ in within_limits(found, broken=lambda staged, _: staged.step == broken)
        ]

    assert steps(None) == steps(0) == [9, 8, 7, 6, 5, 4]
    assert steps(1) == [9, 7, 6]
    assert steps(2) == [9, 8, 7, 6]
    assert steps(1, broken=9) == [9, 8, 7, 6]
    assert steps(1, best="checkpoint-4") == [9, 8, 7, 6, 4]


def test_a_step_that_was_taken_again_is_written_once_at_the_end() -> None:
    """The newer snapshot, unless it is broken."""
    found = [(snapshot(Path("/out"), 9), StagingSlot(index, Path(f"/slot{index}"))) for index in range(2)]
    assert within_limits(found, broken=lambda staged, slot: False) == found[:1]
    assert within_limits(found, broken=lambda staged, slot: slot.index == 0) == found
