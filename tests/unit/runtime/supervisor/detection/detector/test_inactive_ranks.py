"""A rank that does nothing is hung after a minute, unless something may work for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.builders.runtime.detector_world import PHASES, World, hang_in

from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_does_nothing_is_hung_after_a_minute_in_any_phase(
    make: Callable[..., World], phase: Phase
) -> None:
    """Also at its first occurrence; not within a pause of 50 s."""
    world = make(settings=DeadlineSettings())
    hang_in(world, phase)
    assert world.advance(55.0, every=0.5) is None
    stall = world.stalls(20.0, every=0.5)
    assert (stall.culprits, stall.waiters, stall.phase) == ((1,), (0,), phase)
    assert stall.deadline_seconds == 60.0


@pytest.mark.parametrize("what", ["another rank works", "another node", "unreadable", "connected", "traced"])
def test_a_rank_that_does_nothing_is_left_alone_if_something_may_work_for_it(
    make: Callable[..., World], what: str
) -> None:
    """What cannot be seen is unknown."""
    world = make(3, settings=DeadlineSettings(), world_size=4 if what == "another node" else 3)
    hang_in(world, Phase.reward)
    world.issue(2, "all_reduce")
    if what == "another rank works":
        world.writers[2].collective_log.mark(1, CollectiveProgress.completed)
        world.entries[2][-1]["retired"] = True
    elif what == "unreadable":
        world.io[1] = None
    elif what == "connected":
        world.connected = {1}
    elif what == "traced":
        world.process_state[1] = "t"
    assert world.advance(320.0, every=0.5, doing=world.computing(2, 0.5)) is None


def wait_for_a_judge(world: World) -> None:
    """In the first step, rank 1 waits for a server in its second reward function; the first one has returned
    at once, and rank 0 waits.
    """
    world.connected = {1}
    world.issue(0, "all_reduce")
    world.writers[1].enter(Phase.score)
    for _ in range(2):
        world.writers[1].enter(Phase.reward)
        world.writers[1].leave(Phase.reward)
    world.writers[1].enter(Phase.reward)


@pytest.mark.parametrize("first_seconds", [1800.0, 400.0, 150.0])
def test_a_first_wait_for_a_server_has_the_time_limit_of_collectives_or_the_users(
    make: Callable[..., World], first_seconds: float
) -> None:
    """Nothing is known of it: a first function that returned at once says nothing about the next one."""
    world = make(settings=DeadlineSettings(first_seconds=first_seconds))
    wait_for_a_judge(world)
    assert world.advance(first_seconds - 10.0, every=0.5) is None
    awaited = world.watch.awaited
    assert awaited is not None
    assert (awaited.rank, awaited.outside, awaited.unknown_wait) == (1, "10.0.0.5:8000", True)
    assert awaited.deadline_at_seconds == pytest.approx(1000.0 + first_seconds, abs=10.0)
    stall = world.stalls(30.0, every=0.5)
    assert (stall.culprits, stall.phase, stall.deadline_seconds) == ((1,), Phase.reward, first_seconds)


def test_a_wait_for_a_server_that_the_run_has_completed_once_is_known(make: Callable[..., World]) -> None:
    """The next one is ended after five minutes."""
    world = make(settings=DeadlineSettings())
    wait_for_a_judge(world)
    assert world.advance(40.0, every=0.5) is None
    world.writers[1].replace(Phase.data)
    world.writers[1].replace(Phase.reward)
    assert world.advance(290.0, every=0.5) is None
    assert world.stalls(20.0, every=0.5).deadline_seconds == 300.0


def test_a_first_wait_that_began_with_work_is_not_ended_as_a_loop(make: Callable[..., World]) -> None:
    """The rank has built its requests for a minute. A loop beside a connection has five minutes."""
    world = make(settings=DeadlineSettings())
    wait_for_a_judge(world)
    assert world.advance(60.0, every=0.5, doing=world.computing(1, 0.5)) is None
    assert world.advance(1000.0, every=0.5) is None
    found = world.advance(60.0, every=0.5, doing=world.computing(1, 0.5))
    assert found is not None
    assert found.stall is not None
    assert "with CPU time as the only activity" in found.stall.sentence


def test_ranks_that_all_wait_for_a_server_are_shown_and_left_alone(make: Callable[..., World]) -> None:
    """Each calls the judge for its own completions, and none waits for another."""
    world = make(settings=DeadlineSettings())
    world.connected = {0, 1}
    for writer in world.writers:
        writer.replace(Phase.reward)
    assert world.advance(1700.0, every=0.5) is None
    awaited = world.watch.awaited
    assert awaited is not None
    assert (awaited.outside, awaited.waiters) == ("10.0.0.5:8000", ())


def test_a_rank_is_not_blamed_for_the_time_in_which_another_one_worked(make: Callable[..., World]) -> None:
    """It may have waited for that rank, by other means than a collective."""
    world = make(settings=DeadlineSettings())
    world.writers[1].replace(Phase.reward)

    def work() -> None:
        world.cpu[0] += 0.5
        world.writers[0].publish()

    assert world.advance(100.0, every=0.5, doing=work) is None
    world.issue(0, "all_reduce")
    world.writers[0].publish()
    assert world.advance(50.0, every=0.5) is None
    assert world.advance(20.0, every=0.5) is not None


def test_the_awaited_rank_is_shown_with_its_nearest_deadline(make: Callable[..., World]) -> None:
    """Half an hour without observations; a minute once it is seen to do nothing."""
    world = make(settings=DeadlineSettings())
    hang_in(world, Phase.reward)
    assert world.advance(1.5, every=0.5) is None
    assert world.watch.awaited is None
    assert world.advance(1.5, every=0.5) is None
    awaited = world.watch.awaited
    assert awaited is not None
    assert (awaited.rank, awaited.phase, awaited.waiters, awaited.busy) == (1, Phase.reward, (0,), None)
    assert awaited.deadline_at_seconds == pytest.approx(1000.0 + 1800.0)
    assert world.advance(27.0, every=0.5) is None
    awaited = world.watch.awaited
    assert awaited is not None
    assert awaited.busy is False
    assert awaited.deadline_at_seconds == pytest.approx(1000.0 + 60.0, abs=10.0)
