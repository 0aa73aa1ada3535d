"""What memory traces have found: the event, and what is replayed from it.

A rank writes `memory_finding` for each finding of an attempt. The same finding of other ranks and attempts is
one here. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_run.runtime.event import Event, as_record
from grpo_run.runtime.history.history import HistoryPart
from grpo_run.watchdog.text import rank_names

MOST_FINDINGS = 200
"""Different findings of a run that are kept. A rank reports 20 in an attempt."""


class MemoryFound(Event, kw_only=True, tag="memory_finding"):
    """A rank has found a container that holds tensors of many steps.

    Attributes:
        world_size: of the attempt.
        key: the container in words, equal for the same one of another rank or attempt.
        tensors: how many are alive.
        bytes: what their storages take.
        since_step: the step in which the oldest was made.
        steps: of how many steps there are some.
        sentence: which container holds what, and what to do.
    """

    world_size: int
    key: str
    tensors: int = 0
    bytes: int = 0
    since_step: int = 0
    steps: int = 0
    sentence: str


_NOT_SHOWN = {"event", "world_size", *Event.__struct_fields__}
"""Fields of an event that say nothing of what is kept."""


@dataclass(kw_only=True)
class MemoryFinding:
    """One finding.

    Attributes:
        first: as the first rank has found it.
        ranks: that have found it, in any attempt.
        attempts: in which it was found, from 0.
    """

    first: MemoryFound
    ranks: set[int] = field(default_factory=set)
    attempts: set[int] = field(default_factory=set)

    @property
    def text(self) -> str:
        """The sentence, with the ranks if the run has several, and the attempts if there were several."""
        ranks = f"{rank_names(self.ranks)}: " if self.first.world_size > 1 else ""
        attempts = f" (found in {len(self.attempts)} attempts)" if len(self.attempts) > 1 else ""
        return f"{ranks}{self.first.sentence}{attempts}"

    def as_json(self) -> dict[str, Any]:
        """Return what was found first, and where."""
        shown = {name: value for name, value in as_record(self.first).items() if name not in _NOT_SHOWN}
        return {**shown, "ranks": sorted(self.ranks), "attempts": sorted(self.attempts)}


@dataclass(kw_only=True)
class MemoryFindings(HistoryPart):
    """The findings of a run, by key."""

    EVENTS: ClassVar[tuple[type[Event], ...]] = (MemoryFound,)

    found: dict[str, MemoryFinding] = field(default_factory=dict)

    def apply(self, event: MemoryFound) -> None:
        """A rank has found something."""
        if event.key in self.found or len(self.found) < MOST_FINDINGS:
            found = self.found.setdefault(event.key, MemoryFinding(first=event))
            found.ranks.add(event.rank or 0)
            found.attempts.add(event.attempt or 0)

    def notes(self) -> list[str]:
        """Return the findings as lines."""
        return [f"memory: {found.text}" for found in self.found.values()]

    def as_json(self) -> dict[str, Any]:
        """Return the findings."""
        return {"memory_trace": {"findings": [found.as_json() for found in self.found.values()]}}


PART = MemoryFindings
