"""The findings of the memory traces of all ranks, and the snapshots of the CUDA allocator that they have
saved.

A rank writes `memory_finding` for each finding of an attempt. The same finding of other ranks and attempts is
one here: it has the same kind, holder and line. Replayed as part of `runtime.history.history`; shown on the
terminal, by `status` and by reports. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from grpo_run.runtime.event import Event, as_record
from grpo_run.watchdog.text import rank_names, size_text

FOLDER = "memory_trace"
"""Name of the folder in the run directory: one snapshot of each rank, and one more if it has run out of
memory.
"""
VIEWER = "https://docs.pytorch.org/memory_viz"
"""Opens a snapshot; PyTorch's documentation of memory snapshots names it."""
NOTICE = "growing"
"""The kind of a finding that is no alarm: something grows, and it cannot be told whether that ends."""
MOST_FINDINGS = 200
"""Different findings of a run that are kept. A rank reports 20 alarms and 20 notices in an attempt."""
WAITED_SECONDS = 5.0
"""How long the other ranks are waited for before a finding is said. Ranks with the same leak find it after
the same step.
"""


@dataclass(kw_only=True)
class MemoryFinding:
    """One finding.

    Attributes:
        sentence: what is kept, since when, made where, held by whom, as the first rank has found it.
        subject: the holder, or the line, for short.
        fields: of the first record of it.
        found_at: when it was found first, in seconds since the epoch.
        world_size: of the attempt in which it was found first.
        ranks: that have found it, in any attempt.
        attempts: in which it was found, from 0.
    """

    sentence: str
    subject: str
    fields: dict[str, Any]
    found_at: float
    world_size: int
    ranks: set[int] = field(default_factory=set)
    attempts: set[int] = field(default_factory=set)

    @property
    def is_notice(self) -> bool:
        """Whether it may end by itself: the status and the reports have it, and the terminal does not."""
        return self.fields.get("kind") == NOTICE

    @property
    def text(self) -> str:
        """The sentence, with the ranks if the run has several, and the attempts if there were several."""
        ranks = f"{rank_names(self.ranks)}: " if self.world_size > 1 else ""
        attempts = f" (found in {len(self.attempts)} attempts)" if len(self.attempts) > 1 else ""
        return f"{ranks}{self.sentence}{attempts}"

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the first record, and where it was found."""
        return {
            **self.fields,
            "sentence": self.sentence,
            "ranks": sorted(self.ranks),
            "attempts": sorted(self.attempts),
        }


@dataclass(frozen=True, kw_only=True)
class AllocatorSnapshot:
    """A file for PyTorch's viewer.

    Args:
        path: relative to the run directory.
        reason: why it was saved, in words.
    """

    path: str
    rank: int
    step: int
    reason: str
    bytes: int

    @property
    def text(self) -> str:
        """The file, and what it shows."""
        return f"{self.path} ({self.reason}, step {self.step}, {size_text(self.bytes)})"


class MemoryFound(Event, kw_only=True, tag="memory_finding"):
    """A rank has found something, see `runtime/rank/memory_trace`."""

    world_size: int
    key: str
    subject: str
    sentence: str
    kind: str = ""
    tensors: int = 0
    bytes: int = 0
    shape: tuple[int, ...] = ()
    dtype: str = ""
    since_step: int = 0
    steps: int = 0
    made_at: dict[str, Any] | None = None
    holder: str | None = None
    held_at: dict[str, Any] | None = None
    details: Mapping[str, Any] = msgspec.field(default_factory=dict)


class AllocatorSnapshotSaved(Event, kw_only=True, tag="memory_snapshot"):
    """A rank has saved the history of its allocator. `path` is relative to the run directory."""

    path: str
    reason: str
    bytes: int
    entries: int = 0


_SHOWN = (
    "kind", "tensors", "bytes", "shape", "dtype", "since_step", "steps", "made_at", "holder",
    "held_at", "details",
)  # fmt: skip


@dataclass(kw_only=True)
class MemoryFindings:
    """The findings of a run, and the newest snapshots of its ranks by path."""

    found: dict[str, MemoryFinding] = field(default_factory=dict)
    snapshots: dict[str, AllocatorSnapshot] = field(default_factory=dict)

    def apply_found(self, event: MemoryFound) -> None:
        """A rank has found something."""
        rank, attempt = event.rank or 0, event.attempt or 0
        if event.key not in self.found:
            if len(self.found) >= MOST_FINDINGS:
                return
            record = as_record(event)
            self.found[event.key] = MemoryFinding(
                sentence=event.sentence,
                subject=event.subject,
                fields={name: record[name] for name in _SHOWN},
                found_at=event.time,
                world_size=event.world_size,
            )
        self.found[event.key].ranks.add(rank)
        self.found[event.key].attempts.add(attempt)

    def apply_snapshot(self, event: AllocatorSnapshotSaved) -> None:
        """A rank has saved a snapshot of its allocator."""
        self.snapshots[event.path] = AllocatorSnapshot(
            path=event.path, rank=event.rank or 0, step=event.step or 0, reason=event.reason,
            bytes=event.bytes,
        )  # fmt: skip

    def lines(self) -> list[str]:
        """Return the findings as lines, and after them the snapshots."""
        lines = [found.text for found in self.found.values()]
        lines += [f"allocator history: {one.text}, opened by {VIEWER}" for one in self.snapshots.values()]
        return lines

    def as_json(self) -> dict[str, Any]:
        """Return both as `grpo-run status --json` prints them."""
        return {
            "findings": [found.as_json() for found in self.found.values()],
            "snapshots": [vars(one) for one in self.snapshots.values()],
        }


@dataclass(kw_only=True)
class FindingLines:
    """Lines for the terminal: each alarm once, whichever ranks have it and however often ranks restart.

    Attributes:
        said: by key, the ranks that were named.
    """

    said: dict[str, set[int]] = field(default_factory=dict)
    _snapshots: set[str] = field(default_factory=set)

    def skip(self, findings: MemoryFindings) -> None:
        """Say nothing of what an earlier supervisor of the run has said."""
        self.said = {key: set(found.ranks) for key, found in findings.found.items()}
        self._snapshots = set(findings.snapshots)

    def new(
        self, findings: MemoryFindings, *, ranks: Collection[int], now: float, final: bool = False
    ) -> list[str]:
        """Return what is to be said.

        Args:
            ranks: those that are waited for before a finding is said: those of this node.
            now: seconds since the epoch.
            final: there will be nothing more.
        """
        lines = []
        for key, found in findings.found.items():
            said = self.said.get(key)
            if found.is_notice:
                continue
            if said is None:
                if not (final or found.ranks >= set(ranks) or now - found.found_at >= WAITED_SECONDS):
                    continue
                lines.append(f"memory: {found.text}")
            elif found.ranks > said:
                lines.append(f"memory: {rank_names(found.ranks - said)} too: {found.subject}")
            self.said[key] = set(found.ranks)
        for path, snapshot in findings.snapshots.items():
            if path not in self._snapshots:
                self._snapshots.add(path)
                lines.append(f"memory: allocator history saved, {snapshot.text}; open it with {VIEWER}")
        return lines
