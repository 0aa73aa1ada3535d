"""Slots and processes at one moment, and the stall that they show."""

from __future__ import annotations

from typing import Any

from grpo_run.watchdog.observation import OpenPhase, Phase, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.observed import Observed, ProcessFacts
from grpo_run.watchdog.stalls.stall import Stall, find_stall

NOW = 100_000.0
SHORT = Durations.of([0.05] * 21)
EVERY_PHASE = frozenset(Phase)


def nest(*phases: tuple[Phase, float]) -> tuple[OpenPhase, ...]:
    """Open phases, outermost first, each with how many seconds ago it began."""
    return tuple(OpenPhase(phase=phase, since_seconds=NOW - ago) for phase, ago in phases)


def look(slots: dict[int, Slot | None], **changes: Any) -> Stall | None:
    """Detect at NOW. 20 short occurrences of every phase give deadlines of 8 s; no rank waits."""
    given: dict[str, Any] = {
        "now": NOW, "learned": dict.fromkeys(Phase, SHORT), "completed": dict.fromkeys(slots, EVERY_PHASE),
        "settings": DeadlineSettings(floor_seconds=8.0), "processes": dict.fromkeys(slots, facts()),
        "progress": {},
        "waiting": dict.fromkeys(slots, False),
    }  # fmt: skip
    return find_stall(Observed(slots=slots, **(given | changes)))


def stalled(slots: dict[int, Slot | None], **changes: Any) -> Stall:
    """The stall that `look` detects."""
    found = look(slots, **changes)
    assert found is not None
    return found


def facts(state: str = "S", **changes: Any) -> ProcessFacts:
    """A process that sleeps, as one does that waits for anything."""
    return ProcessFacts(**({"state": state, "heartbeat_age_seconds": 0.2} | changes))
