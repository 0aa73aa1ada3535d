"""When the progress line is printed in a pipe or a file, where every printed line stays.

Called by `terminal.py` twice a second. Pure: the clock is passed in.
"""

from __future__ import annotations

from collections.abc import Hashable

from grpo_run.dashboards.terminal.progress import LineKind

INTERVAL_SECONDS = 15.0
"""Shortest time between two lines of a run that trains."""
LONGEST_INTERVAL_SECONDS = 600.0
"""The interval between the lines of one wait doubles up to this."""


class PipeSchedule:
    """Decides which states of the progress line are printed.

    A line of training is printed when it has changed, at most every `INTERVAL_SECONDS`, the first one
    immediately. A start is reported once it takes that long. A wait is reported when it begins, and then at
    growing intervals.

    Args:
        now: monotonic seconds.
    """

    def __init__(self, now: float) -> None:
        self._printed_at = now
        self._trained = False
        self._last = ""
        self._wait: Hashable = None
        self._interval_seconds = INTERVAL_SECONDS

    def due(self, kind: LineKind, text: str, wait: Hashable, now: float) -> bool:
        """Return whether to print this line, and assume that it is printed.

        Args:
            kind, text: of the line.
            wait: identifies who is waited for and where; None outside a wait.
            now: monotonic seconds.
        """
        began, self._wait = wait is not None and wait != self._wait, wait
        if began or wait is None:
            self._interval_seconds = INTERVAL_SECONDS
        first = kind is LineKind.training and not self._trained
        if not (began or first) and (text == self._last or now - self._printed_at < self._interval_seconds):
            return False
        if wait is not None and not began:
            self._interval_seconds = min(2 * self._interval_seconds, LONGEST_INTERVAL_SECONDS)
        self._trained |= kind is not LineKind.starting
        self._last, self._printed_at = text, now
        return True
