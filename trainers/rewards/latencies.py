"""Latencies of reward functions, written to the journal periodically. Called by the wrappers of `served.py`."""

from __future__ import annotations

from collections.abc import Callable

WRITE_SECONDS = 60.0
"""Time between two events of one function."""


class LatencyLog:
    """Counts the calls of one function in this rank and attempt, and writes the totals so far.

    Args:
        name: of the function.
        write: writes a journal event, with fields.
        clock: returns monotonic seconds.
    """

    def __init__(self, name: str, write: Callable[..., None], clock: Callable[[], float]) -> None:
        self._name = name
        self._write = write
        self._clock = clock
        self._calls = self._written_calls = 0
        self._total_seconds = self._longest_seconds = 0.0
        self._write_at = clock()

    def add(self, seconds: float) -> None:
        """A call has returned, or was ended."""
        self._calls += 1
        self._total_seconds += seconds
        self._longest_seconds = max(self._longest_seconds, seconds)
        if self._clock() >= self._write_at:
            self.write()

    def write(self) -> None:
        """Write the totals, if there were calls since the last time."""
        self._write_at = self._clock() + WRITE_SECONDS
        if self._calls == self._written_calls:
            return
        self._written_calls = self._calls
        self._write(
            "reward_latency",
            function=self._name,
            calls=self._calls,
            total_seconds=round(self._total_seconds, 6),
            longest_seconds=round(self._longest_seconds, 6),
        )
