"""Durations of phases over all ranks and attempts of this run, from which deadlines are learned.

Called by `stall_detector.py`, and by the supervisor for the journal and the stragglers. Reads the phase
histograms on the board. Does not judge (`watchdog.stalls`), and keeps nothing beyond this process (the
journal does).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import PhaseKey
from grpo_run.watchdog.stalls.durations import Durations, merge_ranks

REFRESH_SECONDS = 2.0
"""Maximum age of the histograms that a long phase is compared with."""


class LearnedPhases(NamedTuple):
    """Durations by phase and callback, and what each rank has finished in this attempt."""

    durations: dict[PhaseKey, Durations]
    completed: dict[int, frozenset[PhaseKey]]


class PhaseDurations:
    """Durations of one run. `earlier_attempts` holds those of the attempts before the current one."""

    def __init__(self) -> None:
        self.earlier_attempts: dict[PhaseKey, Durations] = {}

    def begin_attempt(self, board: Board, local_ranks: Mapping[int, int]) -> None:
        """Discard the last attempt. `local_ranks` is the slot index of each rank."""
        self._board = board
        self._local_ranks = dict(local_ranks)
        self._cached: tuple[float, LearnedPhases] | None = None
        self._ended: tuple[PhaseKey, float] | None = None

    def by_rank(self) -> dict[int, dict[PhaseKey, Durations]]:
        """Return each rank's durations in this attempt; empty if the board was truncated."""
        if not self._board.has_full_size:
            return {}
        return {
            rank: self._board.phase_histograms(local_rank) for rank, local_rank in self._local_ranks.items()
        }

    def merged(self) -> dict[PhaseKey, Durations]:
        """Return the durations of all ranks and attempts, including the current one."""
        merged = dict(self.earlier_attempts)
        histograms = self.by_rank().values()
        for key in sorted({key for histogram in histograms for key in histogram}, key=str):
            attempt = merge_ranks(histogram[key] for histogram in histograms if key in histogram)
            merged[key] = merged[key].then(attempt) if key in merged else attempt
        if self._ended is not None:
            key, seconds = self._ended
            merged[key] = merged.get(key, Durations()).ended_after(seconds)
        return merged

    def current(self, now: float) -> LearnedPhases:
        """Return durations and completed phases, at most `REFRESH_SECONDS` old at `now` (monotonic seconds)."""
        if self._cached is None or now >= self._cached[0] + REFRESH_SECONDS:
            completed = {rank: frozenset(histogram) for rank, histogram in self.by_rank().items()}
            self._cached = now, LearnedPhases(self.merged(), completed)
        return self._cached[1]

    def record_end(self, key: PhaseKey, seconds: float) -> None:
        """Record that the attempt is ended because a deadline ended a phase or callback after `seconds`.

        The next attempt then waits several times as long, also if the phase has never been completed.
        """
        self._ended = key, seconds
