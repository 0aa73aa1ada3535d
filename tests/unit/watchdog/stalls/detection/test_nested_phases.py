"""Which of the open phases is overdue, and what counts as progress in it."""

from __future__ import annotations

import pytest
from support.builders.watchdog.observed_slots import NOW, SHORT, look, nest, stalled
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import OpenPhase, Phase, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.observed import NestedPhaseTime


def test_a_fresh_inner_phase_does_not_hide_an_overdue_outer_one() -> None:
    """1000 s in a phase with a deadline of 100 s, with a reward that has just begun inside it."""
    learned = {Phase.score: Durations.of([0.1] + [20.0] * 50), Phase.reward: SHORT}
    slots = {0: make_slot(0, phases=nest((Phase.score, 1000.0), (Phase.reward, 0.1)))}
    settings = DeadlineSettings(ceiling_seconds=100.0)
    stall = stalled(slots, learned=learned, settings=settings)
    assert (stall.phase, stall.deadline_seconds, stall.cause) == (Phase.score, 100.0, Cause.no_progress)


def test_an_outer_phase_pauses_during_an_inner_one() -> None:
    """The first checkpoint of a run takes a minute inside a `data` phase of milliseconds."""
    slots = {0: make_slot(0, phases=nest((Phase.data, 60.2), (Phase.checkpoint, 60.0)))}
    assert look(slots, learned={Phase.data: SHORT}, completed={0: {Phase.data}}) is None


def test_the_time_of_a_finished_inner_phase_is_subtracted() -> None:
    """After that checkpoint, `data` alone is open and a minute old."""
    data, saving = OpenPhase(phase=Phase.data, since_seconds=900.0), OpenPhase(
        phase=Phase.checkpoint, since_seconds=900.1
    )  # fmt: skip
    inner = NestedPhaseTime().after({0: make_slot(0, phases=(data, saving))}, 950.0)
    slots: dict[int, Slot | None] = {0: make_slot(0, phases=(data,))}
    inner = inner.after(slots, 960.0).after({0: None}, 961.0).after(slots, 962.0)
    known = {Phase.data: SHORT, Phase.checkpoint: Durations.of([59.9])}
    assert look(slots, now=962.0, learned=known) is not None  # what the time is taken off from
    assert look(slots, now=962.0, learned=known, nested=inner) is None
    stall = stalled(slots, now=969.0, learned=known, nested=inner)
    assert (stall.cause, stall.waited_seconds) == (Cause.data_stall, pytest.approx(9.1))


def test_endless_inner_phases_do_not_hide_an_overdue_outer_one() -> None:
    """For a loop of rewards, at most one deadline per kind of phase is subtracted."""
    score, inner = OpenPhase(phase=Phase.score, since_seconds=0.0), NestedPhaseTime()
    now = 0.0
    while now < 200.0:
        now += 1.0
        reward = OpenPhase(phase=Phase.reward, since_seconds=now)
        slots: dict[int, Slot | None] = {0: make_slot(0, phases=(score, reward))}
        inner = inner.after(slots, now + 0.5)
    assert inner.spent[0, 0, score][Phase.reward] == pytest.approx(199.0)
    assert (stalled(slots, now=now + 0.5, nested=inner).phase, len(inner.spent)) == (Phase.score, 1)


def test_of_two_overdue_phases_the_innermost_names_the_cause() -> None:
    """A hung reward inside `score`, which is overdue too."""
    stall = stalled({0: make_slot(0, phases=nest((Phase.score, 60.0), (Phase.reward, 30.0)))})
    assert (stall.phase, stall.cause) == (Phase.reward, Cause.reward_stall)


@pytest.mark.parametrize(
    ("phase", "cause"),
    [
        (Phase.generate, Cause.generation_stall), (Phase.reward, Cause.reward_stall),
        (Phase.data, Cause.data_stall), (Phase.checkpoint, Cause.checkpoint_stall),
        (Phase.startup, Cause.no_progress), (Phase.forward_backward, Cause.no_progress),
    ],
)  # fmt: skip
def test_the_phase_determines_the_cause(phase: Phase, cause: Cause) -> None:
    """Nothing else is known about a hang without collectives."""
    assert stalled({0: make_slot(0, phases=nest((phase, 20.0)))}).cause is cause


def test_progress_restarts_the_clocks_of_all_open_phases() -> None:
    """An hour of generation whose last token came a second ago is slow, not hung."""
    slots = {0: make_slot(0, phases=nest((Phase.score, 9000.0), (Phase.generate, 8999.0)))}
    assert look(slots, progress={0: NOW - 1.0}) is None
    assert look(slots, progress={0: NOW - 9.0}) is not None


def test_progress_before_a_phase_does_not_count_for_it() -> None:
    """It does not make the phase older either."""
    slots = {0: make_slot(0, phases=nest((Phase.reward, 7.0)))}
    assert look(slots, progress={0: NOW - 50.0}) is None
    assert look(slots, now=NOW + 2.0, progress={0: NOW - 50.0}) is not None
