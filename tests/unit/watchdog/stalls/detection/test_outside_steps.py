"""Before the first step, between two calls and after the end, other deadlines hold."""

from __future__ import annotations

import pytest
from support.builders.watchdog.observed_slots import NOW, look, nest, stalled
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.observation import Phase, RankState


def test_a_first_occurrence_in_a_new_attempt_is_not_held_to_later_ones() -> None:
    """After a restart the first step compiles again."""
    slots = {0: make_slot(0, phases=nest((Phase.forward_backward, 50.0)))}
    assert look(slots, completed={0: {Phase.data}}) is None
    assert look(slots, completed={}) is None
    assert "learned from a first occurrence of 0.1 s" in stalled(slots, now=NOW + 20.0, completed={}).sentence


def test_a_rank_that_never_starts_training_is_found() -> None:
    """In state `starting`, with or without the phase; after an hour if no start-up was observed."""
    for phases in ((), nest((Phase.startup, 4000.0))):
        slot = make_slot(0, state=RankState.starting, phases=phases, last_progress_seconds=NOW - 4000.0)
        stall = stalled({0: slot}, learned={}, completed={})
        assert (stall.phase, stall.deadline_seconds) == (Phase.startup, 3600.0)
        assert "nothing learned yet" in stall.sentence
        assert look({0: slot}, now=NOW - 500.0, learned={}, completed={}) is None


def test_between_two_calls_the_deadline_is_the_ceiling() -> None:
    """Short pauses before say nothing about a later one."""
    slot = make_slot(0, state=RankState.between, phases=nest((Phase.idle, 3000.0)))
    assert look({0: slot}) is None
    assert stalled({0: slot}, now=NOW + 700.0).phase is Phase.idle


@pytest.mark.parametrize("state", [RankState.done, RankState.failed])
def test_a_script_that_has_ended_is_not_judged_by_its_phases(state: RankState) -> None:
    """Other ranks can still all wait."""
    ended = make_slot(0, state=state, phases=nest((Phase.idle, 9000.0)))
    assert look({0: ended}) is None
    stall = stalled({0: ended, 1: make_slot(1, phases=nest((Phase.vote, 20.0)))})
    assert (stall.culprits, stall.waiters) == ((), (1,))
