"""Nothing that was seen in an attempt counts in the next one."""

from __future__ import annotations

from support.builders.runtime.detector_world import World, hang_in, mismatch, suspect_a_stall

from grpo_run.runtime.supervisor.detection._local_ranks import UNREADABLE_SECONDS
from grpo_run.watchdog.observation import Phase


def test_nothing_of_an_earlier_attempt_survives(world: World) -> None:
    """No suspicion, poll or recording: two polls are needed again."""
    mismatch(world)
    while not world.polls:
        world.advance(0.1)
    assert world.watch.suspicion
    assert world.watch.recordings
    world.begin(1)
    assert world.watch.suspicion is None
    assert world.watch.recordings == {}
    assert world.watch.collective_logs() == {0: [], 1: []}
    mismatch(world)
    while not world.polls:
        assert world.advance(0.1) is None
    assert world.advance(1.0) is not None


def test_blindness_ends_with_the_attempt(world: World) -> None:
    """The slots of the next attempt are others."""
    world.scan()
    world.unreadable = {1}
    world.advance(UNREADABLE_SECONDS + 0.2)
    assert world.watch.blind
    world.unreadable = set()
    world.begin(1)
    assert world.watch.blind == {}


def test_a_suspicion_of_an_earlier_attempt_is_not_confirmed(world: World) -> None:
    """The next attempt's first check raises a suspicion of its own."""
    suspect_a_stall(world)
    world.begin(1)
    hang_in(world, Phase.reward)
    assert world.advance(19.0) is None
