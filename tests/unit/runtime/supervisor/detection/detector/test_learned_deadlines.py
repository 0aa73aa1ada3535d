"""Deadlines follow the durations of earlier phases, and what has ended an attempt once."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from support.builders.runtime.detector_world import World

from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.stall import Stall

# deadlines


def test_learned_durations_set_the_deadline(world: World) -> None:
    """After 100 rewards of 1 s, 20 s are too long."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    world.issue(0, "all_reduce")
    for _ in range(2):  # its first reward of the attempt is over
        world.writers[1].replace(Phase.reward)
    assert world.stalls(12.0).deadline_seconds < 10


def overdue_after_rewards_of_a_second(world: World) -> HangFinding:
    """Rank 1 hangs in a reward, while the other waits."""
    world.issue(0, "all_reduce")
    for _ in range(2):  # its first reward of the attempt is over
        world.writers[1].replace(Phase.reward)
    found = world.advance(38.0)
    assert found is not None
    return found


def test_a_phase_that_a_deadline_ended_gets_five_times_as_long(world: World) -> None:
    """If it was only slow, the next attempt completes it; a second end multiplies the deadline again."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    waited = []
    for attempt in (1, 2):
        stall = overdue_after_rewards_of_a_second(world).stall
        assert stall is not None
        waited.append(stall.waited_seconds)
        world.watch.phase_durations.earlier_attempts = world.watch.phase_durations.merged()
        world.begin(attempt)
    assert waited[1] == pytest.approx(5 * waited[0], abs=1.5)


def test_a_suspicion_does_not_extend_a_deadline(world: World) -> None:
    """Only an end does."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    world.issue(0, "all_reduce")
    for _ in range(2):
        world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        assert world.advance(0.1) is None
    assert world.watch.phase_durations.merged()[Phase.reward].ended_seconds == 0.0
    assert world.advance(1.0) is not None
    assert world.watch.phase_durations.merged()[Phase.reward].ended_seconds > 4.0


@pytest.mark.parametrize(
    ("lasts", "remembered"), [(200.0, 200.0), (3600.0, 3600.0), (1e6, 0.0), (math.inf, 0.0)]
)
def test_a_sleep_beyond_its_deadline_is_remembered_if_its_end_is_in_sight(
    world: World, monkeypatch: pytest.MonkeyPatch, lasts: float, remembered: float
) -> None:
    """The next attempt waits for it. One that lasts for days would make all later deadlines useless."""
    world.watch.settings = DeadlineSettings()
    sleeping = Stall(
        cause=Cause.no_progress, culprits=(1,), waiters=(0,), phase=Phase.callback, callback="Upload.on_save",
        deadline_seconds=60.0, waited_seconds=7.0, lasts_seconds=lasts, sentence="It sleeps.",
        confidence="proved",
    )  # fmt: skip
    found = HangFinding(stall=sleeping, began_at_seconds=world.now)
    monkeypatch.setattr(world.watch._waits, "scan", lambda slots, now: found)
    assert world.scan() is found
    learned = world.watch.phase_durations.merged().get("Upload.on_save", Durations())
    assert learned.ended_seconds == remembered


def in_a_short_reward(make: Callable[..., World]) -> World:
    """Rank 1 is in a reward, which usually takes 10 ms, and rank 0 waits for it."""
    world = make(settings=DeadlineSettings())
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([0.01] * 30)}
    world.issue(0, "all_reduce")
    for _ in range(2):
        world.writers[1].replace(Phase.reward)
    return world


# quiet and frozen ranks


def test_a_reward_that_computes_is_named_early_and_ended_late(make: Callable[..., World]) -> None:
    """It cannot be told from an endless loop."""
    world = in_a_short_reward(make)
    assert world.advance(290.0, every=0.5, doing=world.computing(1, 0.5)) is None
    assert world.watch.awaited is not None
    assert (world.watch.awaited.rank, world.watch.awaited.busy) == (1, True)
    stall = world.stalls(15.0, every=0.5, doing=world.computing(1, 0.5))
    assert "deadline 300 s, with CPU time as the only activity" in stall.sentence


def test_a_reward_that_stops_computing_gets_the_usual_deadline_again(make: Callable[..., World]) -> None:
    """It may wait for a sandbox now."""
    world = in_a_short_reward(make)
    assert world.advance(100.0, every=0.5, doing=world.computing(1, 0.5)) is None
    assert world.advance(50.0, every=0.5) is None
    assert world.advance(20.0, every=0.5) is not None


@pytest.mark.parametrize("connected", [True, False])
def test_a_connection_to_outside_lengthens_a_learned_deadline(
    make: Callable[..., World], connected: bool
) -> None:
    """A server is slow once, while the rank computes a little, so that it is not quiet."""
    world = in_a_short_reward(make)
    world.connected = {1} if connected else set()
    found = world.advance(290.0, every=0.5, doing=world.computing(1, 0.01))
    assert (found is None) is connected
    if found is not None:
        return
    assert world.watch.awaited is not None
    assert world.watch.awaited.deadline_at_seconds - world.watch.awaited.since_seconds == 300.0
    found = world.advance(15.0, every=0.5, doing=world.computing(1, 0.01))
    assert found is not None
    assert found.stall is not None
    assert found.stall.culprits == (1,)
    assert "with a connection to a process outside the job" in found.stall.sentence


# attempts


def test_durations_add_up_over_attempts(world: World) -> None:
    """Those of the last attempt from the journal, then those of the current one."""
    for writer in world.writers:
        for seconds in (3.0, 1.0, 1.0):
            writer.replace(Phase.reward)
            world.now += seconds
            writer.replace(Phase.data)
    first = world.watch.phase_durations.merged()[Phase.reward]
    assert (first.count, first.first_seconds, first.max_seconds) == (
        2,
        pytest.approx(3.0),
        pytest.approx(1.0),
    )
    world.watch.phase_durations.earlier_attempts = world.watch.phase_durations.merged()
    world.begin(1)
    assert world.watch.phase_durations.merged()[Phase.reward] == first
    for seconds in (5.0, 2.0):
        world.writers[0].replace(Phase.reward)
        world.now += seconds
        world.writers[0].replace(Phase.data)
    both = world.watch.phase_durations.merged()[Phase.reward]
    assert (both.count, both.first_seconds, both.max_seconds) == (3, pytest.approx(5.0), pytest.approx(2.0))


def test_merging_durations_twice_counts_them_once(world: World) -> None:
    """They are merged at every check."""
    world.writers[0].replace(Phase.reward)
    world.writers[0].replace(Phase.reward)
    world.writers[0].replace(Phase.data)
    assert world.watch.phase_durations.merged() == world.watch.phase_durations.merged()
    assert world.watch.phase_durations.merged()[Phase.reward].count == 1
