"""What every rank was doing over the last minutes, as seen from outside: the picture a report draws.

The supervisor notes each look; phases that begin and end between two looks are not in it. Bounded. Kept in
memory and written into an incident's folder as `timeline.json`. Does not judge.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from grpo_run.watchdog.observation import Slot

KEPT_SPANS = 400


class Timeline:
    """Spans of phases by rank, on the monotonic clock."""

    def __init__(self) -> None:
        self._spans: dict[int, deque[list[Any]]] = {}
        self._seen: dict[int, tuple[str, float]] = {}

    def note(self, slots: Mapping[int, Slot | None], now: float) -> None:
        """Take one look into account; a rank that cannot be read is `unknown`."""
        for rank, slot in slots.items():
            spans = self._spans.setdefault(rank, deque(maxlen=KEPT_SPANS))
            if slot is None:
                name, since = "unknown", now
            elif slot.phases:
                name, since = slot.phases[-1].phase.name, slot.phases[-1].since_seconds
            else:
                name, since = slot.state.name, slot.last_progress_seconds
            before, self._seen[rank] = self._seen.get(rank), (name, since)
            if before is not None and before[0] == name and (before[1] == since or name == "unknown"):
                continue
            # an outer phase that goes on began long ago: the inner one ended at some time before this look
            begin = since if not spans or since >= spans[-1][1] else now
            if spans:
                spans[-1][2] = min(begin, now)
            spans.append([name, begin, None])

    def clear(self) -> None:
        """Forget; a new attempt begins."""
        self._spans.clear()
        self._seen.clear()

    def as_json(self, now: float) -> dict[str, Any]:
        """`{"now": 0.0, "ranks": {"0": [[phase, begin, end or null], …]}}`, seconds before now as negative numbers."""
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
