"""What a run has learned of its phases: added up over attempts, read seldom, longer after a deadline was met."""

from __future__ import annotations

from typing import Any, cast

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.detection.phase_durations import PATIENCE_GROWTH, SHOWN_SECONDS, Learned
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations

SETTINGS = DeadlineSettings()


class Counted:
    """A board's tallies, and how often they were read."""

    def __init__(self) -> None:
        self.intact = True
        self.reads = 0
        self.counted: dict[int, dict[Phase, Durations]] = {}

    def tallies(self, place: int) -> dict[Phase, Durations]:
        """Of one slot."""
        self.reads += 1
        return self.counted.get(place, {})


@pytest.fixture
def counted() -> Counted:
    """Nothing yet."""
    return Counted()


@pytest.fixture
def learned(counted: Counted) -> Learned:
    """Of two ranks that sit in each other's slots."""
    made = Learned(SETTINGS)
    made.begin_attempt(cast(Board, counted), {0: 1, 1: 0})
    return made


def durations(*seconds: float) -> Durations:
    """The first of a phase, and the rest."""
    return Durations.of(list(seconds))


def test_tallies_are_by_rank_and_not_by_slot(learned: Learned, counted: Counted) -> None:
    """Ranks of a second node begin at another number."""
    counted.counted = {0: {Phase.reward: durations(2.0, 1.0)}}
    assert learned.tallies() == {0: {}, 1: {Phase.reward: durations(2.0, 1.0)}}


def test_a_broken_board_has_taught_nothing(learned: Learned, counted: Counted) -> None:
    """And is not read: it may end this process."""
    counted.intact = False
    learned.before = {Phase.reward: durations(2.0, 1.0)}
    assert learned.tallies() == {}
    assert learned.durations() == learned.before
    assert counted.reads == 0


def test_attempts_before_count(learned: Learned, counted: Counted) -> None:
    """What they have shown, and what this one has."""
    learned.before = {Phase.reward: durations(2.0, 1.0, 4.0), Phase.score: durations(1.0)}
    counted.counted = {0: {Phase.reward: durations(3.0, 1.5)}}
    found = learned.durations()
    assert found[Phase.score] == durations(1.0)
    assert found[Phase.reward] == learned.before[Phase.reward].then(durations(3.0, 1.5))
    assert learned.before[Phase.reward] == durations(2.0, 1.0, 4.0), "not added twice"


def test_a_phase_ended_for_its_deadline_may_take_longer_next_time(learned: Learned, counted: Counted) -> None:
    """Until the next attempt is over; it may only have been slow."""
    counted.counted = {0: {Phase.reward: durations(2.0, 1.0)}}
    before = learned.durations()[Phase.reward].max_seconds
    learned.note_ended(Phase.reward, 30.0)
    longest = PATIENCE_GROWTH * 30.0 / SETTINGS.factor_seen
    assert learned.durations()[Phase.reward].max_seconds == pytest.approx(longest)
    assert longest > before
    learned.begin_attempt(cast(Board, counted), {0: 0})
    assert learned.durations()[Phase.reward].max_seconds == before


def test_what_is_shown_is_read_anew_after_a_while(learned: Learned, counted: Counted) -> None:
    """A look comes ten times a second; a board with many ranks is not read each time."""
    assert learned.shown(100.0).completed == {0: frozenset(), 1: frozenset()}
    counted.counted = {0: {Phase.reward: durations(2.0, 1.0)}}
    reads = counted.reads
    assert learned.shown(100.0 + 0.9 * SHOWN_SECONDS).learned == {}
    assert counted.reads == reads
    shown: Any = learned.shown(100.0 + SHOWN_SECONDS)
    assert shown.completed == {0: frozenset(), 1: frozenset({Phase.reward})}
    assert set(shown.learned) == {Phase.reward}
