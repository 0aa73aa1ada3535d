"""Time of a run from its first event to its end, without the time in which no supervisor ran.

Filled by `history.py`. Times are seconds since the epoch. Pure: they are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class WallTime:
    """Time of one run."""

    first: float | None = None
    """Of the first event."""
    last: float | None = None
    """Of the last event."""
    _previous: float | None = None
    _ended_at: float | None = None
    _idle_seconds: float = 0.0

    def apply_event(self, at: float) -> None:
        """Note an event. Call it before what the event itself changes."""
        if self.first is None:
            self.first = at
        self._previous, self.last = self.last, at

    def apply_run_started(self, at: float) -> None:
        """A supervisor has started: there was none since the end, or since the event before."""
        absent_since = self._ended_at if self._ended_at is not None else self._previous
        if absent_since is not None:
            self._idle_seconds += max(0.0, at - absent_since)
        self._ended_at = None

    def apply_run_ended(self, at: float) -> None:
        """The supervisor has ended the run."""
        self._ended_at = at

    def seconds_to_last_event(self) -> float:
        """Return the time from the first event to the last one, in seconds."""
        return max(0.0, (self.last or 0.0) - (self.first or 0.0) - self._idle_seconds)

    def seconds(self, now: float | None) -> float:
        """Return the time of the run so far, in seconds. There must have been an event.

        Args:
            now: for a run that is live; None for the time of the last event.
        """
        end = self._ended_at if self._ended_at is not None else (now if now is not None else self.last)
        assert end is not None
        assert self.first is not None
        return end - self.first - self._idle_seconds
