"""Durations of phases over all ranks and attempts of this run, from which deadlines are learned.

Called by `stall_detector.py`, and by the supervisor for the journal and the stragglers. Reads the phase
histograms on the board. Does not judge (`watchdog.stalls`), and keeps nothing beyond this process (the
journal does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations, merge_ranks

REFRESH_SECONDS = 2.0
"""Maximum age of the histograms that a long phase is compared with."""
PATIENCE_GROWTH = 2.0
"""How many times as long a phase may take in the next attempt after it missed its deadline in this one."""


class LearnedPhases(NamedTuple):
    """Durations by phase, and the phases that each rank has finished in this attempt."""

    durations: dict[Phase, Durations]
    completed: dict[int, frozenset[Phase]]


class PhaseDurations:
    """Durations of one run. `earlier_attempts` holds those of the attempts before the current one.

    Args:
        settings: bounds of the learned deadlines.
    """

    def __init__(self, settings: DeadlineSettings) -> None:
        self._settings = settings
        self.earlier_attempts: dict[Phase, Durations] = {}

    def begin_attempt(self, board: Board, places: Mapping[int, int]) -> None:
        """Discard the last attempt. `places` is the slot index of each rank."""
        self._board = board
        self._places = dict(places)
        self._cached: tuple[float, LearnedPhases] | None = None
        self._terminated: tuple[Phase, float] | None = None

    def by_rank(self) -> dict[int, dict[Phase, Durations]]:
        """Return each rank's durations in this attempt; empty if the board was truncated."""
        if not self._board.has_full_size:
            return {}
        return {rank: self._board.phase_histograms(place) for rank, place in self._places.items()}

    def merged(self) -> dict[Phase, Durations]:
        """Return the durations of all ranks and attempts, including the current one."""
        merged = dict(self.earlier_attempts)
        histograms = self.by_rank()
        for phase in Phase:
            observed = [histogram[phase] for histogram in histograms.values() if phase in histogram]
            if observed:
                attempt = merge_ranks(observed)
                merged[phase] = merged[phase].then(attempt) if phase in merged else attempt
        if self._terminated is not None and self._terminated[0] in merged:
            # if the phase was only slow, the next attempt allows `PATIENCE_GROWTH` times this duration
            phase, seconds = self._terminated
            merged[phase] = merged[phase].lasting(PATIENCE_GROWTH * seconds / self._settings.factor_seen)
        return merged

    def current(self, now: float) -> LearnedPhases:
        """Return durations and completed phases, at most `REFRESH_SECONDS` old at `now` (monotonic seconds)."""
        if self._cached is None or now >= self._cached[0] + REFRESH_SECONDS:
            completed = {rank: frozenset(histogram) for rank, histogram in self.by_rank().items()}
            self._cached = now, LearnedPhases(self.merged(), completed)
        return self._cached[1]

    def record_termination(self, phase: Phase, seconds: float) -> None:
        """Record that the attempt is terminated because `phase` missed its deadline after `seconds`."""
        self._terminated = phase, seconds
