"""Injections in the journal, and which of them have fired. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.history import HistoryPart


class FaultInjected(Event, kw_only=True):
    """An injection of the command line is about to act. `injection` is its canonical text."""

    kind: str = ""
    injection: str = ""
    phase: str = ""


@dataclass(kw_only=True)
class FiredInjections(HistoryPart):
    """The injections of a run that have fired so far."""

    EVENTS: ClassVar[tuple[type[Event], ...]] = (FaultInjected,)

    texts: list[str] = field(default_factory=list)
    """Canonical texts, in the order of the journal."""

    def apply(self, event: FaultInjected) -> None:
        """Add the injection of one event."""
        self.texts.append(event.injection)


PART = FiredInjections
