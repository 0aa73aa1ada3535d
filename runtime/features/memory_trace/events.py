"""What memory traces have found: the event, and what is replayed from it.

A rank writes `memory_finding` for each finding of an attempt. The same finding of other ranks and attempts is
one here: it has the same kind, holder and line. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from grpo_run.runtime.event import Event, as_record
from grpo_run.runtime.history.history import HistoryPart
from grpo_run.watchdog.text import rank_names

NOTICE = "growing"
"""The kind of a finding that is no alarm: something grows, and it cannot be told whether that ends."""
MOST_FINDINGS = 200
"""Different findings of a run that are kept. A rank reports 20 alarms and 20 notices in an attempt."""


@dataclass(frozen=True)
class Site:
    """A line of a file, and the function there; no line where only the file is known."""

    file: str
    line: int | None = None
    function: str | None = None


class MemoryFound(Event, kw_only=True, tag="memory_finding"):
    """A rank has found something.

    Attributes:
        world_size: of the attempt.
        key: equal for the same finding of another rank or attempt: kind, holder, and where that begins.
        subject: the holder, for short.
        kind: `graph` or `growth`, which are alarms, or `growing`, a notice.
        tensors: how many are alive.
        bytes: what their storages take.
        shape: of the newest, with its `dtype`.
        since_step: the step in which the oldest was made.
        steps: of how many steps there are some.
        made_at: the line of the script; None if it was not recorded.
        holder: in words, `list 'history' of Collector`.
        held_at: where the function or class of the holder begins.
        details: figures of `growth`: `bytes_a_step`, `steps_left` and `free_bytes`.
        sentence: what is kept, since when, made where, held by whom.
    """

    world_size: int
    key: str
    subject: str
    kind: str = ""
    tensors: int = 0
    bytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    since_step: int = 0
    steps: int = 0
    made_at: Site | None = None
    holder: str | None = None
    held_at: Site | None = None
    details: dict[str, Any] = msgspec.field(default_factory=dict)
    sentence: str


_NOT_SHOWN = {"event", "world_size", "key", "subject", *Event.__struct_fields__}
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
