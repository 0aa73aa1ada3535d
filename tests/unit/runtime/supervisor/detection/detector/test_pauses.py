"""A supervisor, a job or a machine that was stopped has not been idle."""

from __future__ import annotations

from collections.abc import Callable

from support.builders.runtime.detector_world import World, at_the_end, hang_in, mismatch, suspect_a_stall

from grpo_run.runtime.supervisor.detection.detector import SUPERVISOR_PAUSE_SECONDS
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

# a supervisor that was itself stopped


def test_a_pause_withdraws_a_suspicion(world: World) -> None:
    """It is not confirmed by the inactivity of ranks that were stopped as well."""
    suspect_a_stall(world)
    world.now += 60.0
    assert world.scan() is None
    assert world.watch.suspicion is None


def test_a_pause_after_the_end_of_the_scripts_is_not_inactivity(world: World) -> None:
    """The machine may have been stopped while the processes were exiting."""
    at_the_end(world)
    assert world.scan() is None
    world.now += 60.0
    assert world.scan() is None


def test_a_pause_of_the_supervisor_restarts_all_clocks(world: World) -> None:
    """The whole machine may have been stopped."""
    hang_in(world, Phase.reward)
    assert world.advance(19.0) is None
    world.now += 60.0
    assert world.scan() is None
    assert world.watch.suspicion is None
    assert world.advance(19.0) is None
    assert world.advance(3.0) is not None


def test_polls_before_and_after_a_pause_prove_nothing(world: World) -> None:
    """Two polls with a pause of the supervisor between them count as one."""
    mismatch(world)
    while not world.polls:
        world.advance(0.1)
    world.now += SUPERVISOR_PAUSE_SECONDS + 1.0
    assert world.scan() is None
    assert len(world.polls) == 1
    assert world.advance(1.0) is not None
    assert len(world.polls) == 3


def test_scans_two_seconds_apart_are_no_pause(world: World) -> None:
    """A slow machine is not a stopped one."""
    mismatch(world)
    assert world.advance(10.0, every=1.9) is not None


# quiet and frozen ranks


def test_a_rank_that_is_stopped_is_ended_at_the_deadline_that_is_shown(make: Callable[..., World]) -> None:
    """Whoever suspends a job stops its supervisor too."""
    world = make(settings=DeadlineSettings(), ranks=1)
    world.writers[0].replace(Phase.reward)
    world.process_state[0] = "T"
    world.frozen = {0}
    assert world.advance(15.0, every=0.5) is None
    assert world.watch.awaited is not None
    ends_in = world.watch.awaited.deadline_at_seconds - world.now
    assert 0 < ends_in < 10
    stall = world.stalls(ends_in + 5.0, every=0.5)
    assert (stall.cause, stall.culprits) == (Cause.interpreter_stuck, (0,))


def test_a_suspended_job_with_one_rank_survives(make: Callable[..., World]) -> None:
    """The supervisor is continued first."""
    world = make(settings=DeadlineSettings(), ranks=1)
    world.writers[0].replace(Phase.reward)
    world.process_state[0] = "T"
    world.frozen = {0}
    world.scan()
    world.now += 600.0
    assert world.advance(15.0, every=0.5) is None
    world.process_state[0] = "S"
    world.frozen = set()
    assert world.advance(50.0, every=0.5) is None


def test_ranks_that_are_all_stopped_are_ended_like_one(make: Callable[..., World]) -> None:
    """A scheduler that suspends a job stops its supervisor too, so this is none."""
    world = make(settings=DeadlineSettings())
    hang_in(world, Phase.reward)
    for rank in (0, 1):
        world.process_state[rank] = "T"
    world.frozen = {0, 1}
    stall = world.stalls(40.0, every=0.5)
    assert (stall.cause, sorted(stall.culprits)) == (Cause.interpreter_stuck, [0, 1])
