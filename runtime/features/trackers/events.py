"""Runs that trackers have opened: what the journal says of them, and what is replayed from it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.history import HistoryPart

NAME = "trackers"
"""Under which the names are in `RankSettings.features`."""


class TrackerRun(Event, kw_only=True):
    """A tracker such as wandb has opened a run: `opening` is what it was asked for."""

    opening: str
    name: str


@dataclass(kw_only=True)
class TrackerRuns(HistoryPart):
    """The names of the runs that trackers have opened, by opening."""

    EVENTS: ClassVar[tuple[type[Event], ...]] = (TrackerRun,)

    names: dict[str, str] = field(default_factory=dict)

    def apply(self, event: TrackerRun) -> None:
        """Take the name of a run; a later one of the same opening replaces it."""
        self.names[event.opening] = event.name


PART = TrackerRuns
