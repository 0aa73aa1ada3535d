"""Learning guards in the journal: trips, and new seeds; and what is counted of them. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from grpo_run.runtime.event import Event
from grpo_run.runtime.features.learning_guards.settings import GuardResponse, LearningGuard
from grpo_run.runtime.history.history import HistoryPart


class LearningGuardTripped(Event, kw_only=True, tag="guard_tripped"):
    """A learning guard has tripped, see `_judge.Trip`."""

    guard: str
    response: str | None = None
    onset: int | None = None
    sentence: str = ""


class Reseeded(Event, kw_only=True):
    """From this step on, ranks draw other random numbers, see `settings.FreshSeeds`."""

    order: int


@dataclass(kw_only=True)
class GuardTrips(HistoryPart):
    """How often guards have tripped.

    Attributes:
        counts: by guard.
        nonfinite_refused: how often a step was refused because its loss or gradient was not finite.
    """

    EVENTS: ClassVar[tuple[type[Event], ...]] = (LearningGuardTripped,)

    counts: Counter[str] = field(default_factory=Counter)
    nonfinite_refused: int = 0

    def apply(self, event: LearningGuardTripped) -> None:
        """Count a trip."""
        self.counts[event.guard] += 1
        refused = event.response in (GuardResponse.stop, GuardResponse.roll_back)
        self.nonfinite_refused += event.guard == LearningGuard.nonfinite and refused


PART = GuardTrips
