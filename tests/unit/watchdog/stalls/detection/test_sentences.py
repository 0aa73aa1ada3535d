"""A stall is described by rank, phase, time, and what was learned."""

from __future__ import annotations

import pytest
from support.builders.watchdog.observed_slots import NOW, SHORT, nest, stalled
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.observation import OpenPhase, Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


def test_the_sentence_names_rank_phase_time_and_what_was_learned() -> None:
    """One line, for the title of the report."""
    settings = DeadlineSettings(floor_seconds=6.0)
    slots = {
        0: make_slot(0, phases=nest((Phase.vote, 7.0))),
        1: make_slot(1, phases=nest((Phase.reward, 7.2))),
    }
    stall = stalled(slots, settings=settings)
    assert stall.sentence == (
        "Rank 1 has been in reward for 7.2 s without progress (deadline 6.0 s, learned from 20 occurrences)."
    )
    assert (stall.culprits, stall.waiters, stall.confidence) == ((1,), (0,), "deadline")
    assert (stall.deadline_seconds, stall.waited_seconds) == (6.0, pytest.approx(7.2))


def test_the_sentence_names_the_callback() -> None:
    """Its class and event; it has deadlines of its own."""
    here = OpenPhase(phase=Phase.callback, since_seconds=NOW - 61.0, callback="MyCallback.on_step_end")
    slots = {0: make_slot(0, phases=nest((Phase.vote, 61.0))), 1: make_slot(1, phases=(here,))}
    stall = stalled(
        slots, settings=DeadlineSettings(), learned={"MyCallback.on_step_end": SHORT},
        completed={1: {"MyCallback.on_step_end"}},
    )  # fmt: skip
    assert stall.sentence == (
        "Rank 1 has been in callback MyCallback.on_step_end for 61.0 s without progress"
        " (deadline 60.0 s, learned from 20 occurrences)."
    )
    assert stall.key == "MyCallback.on_step_end"
