"""Timeline of the phases of every rank over the last minutes, as the supervisor observed them.

The supervisor records every scan; a phase that begins and ends between two scans is not included. Limited in
size, kept in memory, and written to an incident's directory as `timeline.json` for the report. Does not
judge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from grpo_run.watchdog.observation import Slot

KEPT_SPANS = 400


class PhaseTimeline:
    """Spans of phases by rank in one attempt, on the monotonic clock."""

    def __init__(self) -> None:
        self._spans: dict[int, deque[list[Any]]] = {}
        self._last: dict[int, tuple[str, float]] = {}
        self._slots: dict[int, Slot | None] = {}

    def record(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Record one scan at `now` (monotonic seconds). A rank that cannot be read is `unknown`."""
        for rank, slot in slots.items():
            if slot is not None and slot is self._slots.get(rank):
                continue  # the board returns the same reading while nothing has been written
            self._slots[rank] = slot
            spans = self._spans.setdefault(rank, deque(maxlen=KEPT_SPANS))
            if slot is None:
                name, since = "unknown", now
            elif slot.phases:
                name, since = slot.phases[-1].phase.name, slot.phases[-1].since_seconds
            else:
                name, since = slot.state.name, slot.last_progress_seconds
            before, self._last[rank] = self._last.get(rank), (name, since)
            if before is not None and before[0] == name and (before[1] == since or name == "unknown"):
                continue
            # an outer phase that continues began before the inner one, which ended at some time before this
            # scan
            begin = since if not spans or since >= spans[-1][1] else now
            if spans:
                spans[-1][2] = min(begin, now)
            spans.append([name, begin, None])

    def as_json(self, now: float) -> dict[str, Any]:
        """Return `{"now": 0.0, "ranks": {"0": [[phase, begin, end or null], …]}}`.

        Times are relative to now.
        """
        return {
            "now": 0.0,
            "ranks": {
                str(rank): [
                    [name, round(begin - now, 4), None if end is None else round(end - now, 4)]
                    for name, begin, end in spans
                ]
                for rank, spans in self._spans.items()
            },
        }
