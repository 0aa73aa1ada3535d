"""Phases that cost more and more: what the journal says of them, and what is replayed from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.history import HistoryPart


class GrowthFound(Event, kw_only=True):
    """A phase or callback costs so many times as much as at the beginning, and rises."""

    train_call: int | None = None
    phase: str
    factor: float
    sentence: str


@dataclass(kw_only=True)
class GrownPhases(HistoryPart):
    """By phase or callback, how many times as much as at the beginning it costs, and the sentence."""

    EVENTS: ClassVar[tuple[type[Event], ...]] = (GrowthFound,)

    found: dict[str, tuple[float, str]] = field(default_factory=dict)

    def apply(self, event: GrowthFound) -> None:
        """Take what was found."""
        self.found[event.phase] = event.factor, event.sentence

    def as_json(self) -> dict[str, Any]:
        """Return the factors, by phase or callback."""
        return {"growth": {name: factor for name, (factor, _) in self.found.items()}}

    def pace(self) -> Sequence[str]:
        """Return the sentences."""
        return [sentence for _, sentence in self.found.values()]


PART = GrownPhases
