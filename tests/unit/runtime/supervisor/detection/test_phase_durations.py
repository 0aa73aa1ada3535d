"""Learned durations of phases: added up over attempts, cached, extended after a missed deadline."""

from __future__ import annotations

from typing import Any, cast

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.supervisor.detection._local_ranks import REFRESH_SECONDS, PhaseDurations
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import Durations

SETTINGS = DeadlineSettings()


class FakeBoard:
    """A board's phase histograms, and how often they were read."""

    def __init__(self) -> None:
        self.has_full_size = True
        self.reads = 0
        self.histograms: dict[int, dict[Phase, Durations]] = {}

    def durations(self, place: int) -> dict[Phase, Durations]:
        """Return the histograms of one slot."""
        self.reads += 1
        return self.histograms.get(place, {})


@pytest.fixture
def board() -> FakeBoard:
    """A board without any finished phase."""
    return FakeBoard()


@pytest.fixture
def learned(board: FakeBoard) -> PhaseDurations:
    """Durations of two ranks that use each other's slot index."""
    made = PhaseDurations()
    made.begin_attempt(cast(Board, board), {0: 1, 1: 0})
    return made


def durations(*seconds: float) -> Durations:
    """The first occurrence of a phase, then the later ones."""
    return Durations.of(list(seconds))


def test_durations_are_by_rank_and_not_by_slot(learned: PhaseDurations, board: FakeBoard) -> None:
    """On a second node, ranks and slot indices differ."""
    board.histograms = {0: {Phase.reward: durations(2.0, 1.0)}}
    assert learned.by_rank() == {0: {}, 1: {Phase.reward: durations(2.0, 1.0)}}


def test_a_truncated_board_is_not_read(learned: PhaseDurations, board: FakeBoard) -> None:
    """Reading it could terminate this process; only earlier attempts count."""
    board.has_full_size = False
    learned.earlier_attempts = {Phase.reward: durations(2.0, 1.0)}
    assert learned.by_rank() == {}
    assert learned.merged() == learned.earlier_attempts
    assert board.reads == 0


def test_earlier_attempts_count(learned: PhaseDurations, board: FakeBoard) -> None:
    """Their durations are combined with those of the current attempt."""
    learned.earlier_attempts = {Phase.reward: durations(2.0, 1.0, 4.0), Phase.score: durations(1.0)}
    board.histograms = {0: {Phase.reward: durations(3.0, 1.5)}}
    found = learned.merged()
    assert found[Phase.score] == durations(1.0)
    assert found[Phase.reward] == learned.earlier_attempts[Phase.reward].then(durations(3.0, 1.5))
    assert learned.earlier_attempts[Phase.reward] == durations(2.0, 1.0, 4.0), "not added twice"


@pytest.mark.parametrize("known", [True, False])
def test_a_phase_that_a_deadline_ended_may_take_five_times_as_long_in_the_next_attempt(
    learned: PhaseDurations, board: FakeBoard, known: bool
) -> None:
    """Also if it has never been completed; it may only have been slow."""
    board.histograms = {0: {Phase.reward: durations(2.0, 1.0)}} if known else {}
    learned.record_end(Phase.reward, 2000.0)
    merged = learned.merged()
    assert merged[Phase.reward].ended_seconds == 2000.0
    for occurrence in Occurrence:
        assert deadline_seconds(Phase.reward, merged[Phase.reward], occurrence, SETTINGS) == 10_000.0
    # the supervisor passes it on through the journal
    learned.begin_attempt(cast(Board, board), {0: 0})
    learned.earlier_attempts = merged
    assert learned.merged()[Phase.reward].ended_seconds == 2000.0


def test_a_callback_is_learned_by_its_name(learned: PhaseDurations) -> None:
    """An end in one callback says nothing about another."""
    learned.record_end("Upload.on_save", 60.0)
    assert learned.merged() == {"Upload.on_save": Durations(ended_seconds=60.0)}


def test_current_durations_are_cached_for_a_while(learned: PhaseDurations, board: FakeBoard) -> None:
    """Ten scans per second do not read the histograms of all ranks each time."""
    assert learned.current(100.0).completed == {0: frozenset(), 1: frozenset()}
    board.histograms = {0: {Phase.reward: durations(2.0, 1.0)}}
    reads = board.reads
    assert learned.current(100.0 + 0.9 * REFRESH_SECONDS).durations == {}
    assert board.reads == reads
    current: Any = learned.current(100.0 + REFRESH_SECONDS)
    assert current.completed == {0: frozenset(), 1: frozenset({Phase.reward})}
    assert set(current.durations) == {Phase.reward}
