"""A tensor that a script replaces by a longer one step after step, as in `x = torch.cat([x, new])`.

Used by `tracer.py`. Only one storage is alive at the end of a step, so nothing accumulates in number. The batches of a curriculum grow
in the same way and are not kept, so lengths are a suspicion only: whether a tensor was made from that of an earlier step is recorded by
`sites.py` in single steps. `longest_runs` counts and is pure. Holds no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from grpo_run.runtime.rank.memory_trace.census import SMALLEST_BYTES, Group
from grpo_run.runtime.rank.memory_trace.growth import ENOUGH, ENOUGH_IF_BOUNDED, FIRST_STEPS, SUSPICIOUS
from grpo_run.runtime.rank.memory_trace.ledger import StorageEntry

RECORDED_STEPS = 12
"""Steps that are recorded for a suspicion, if none of them makes such a tensor."""
IN_VAIN = 3
"""Recorded steps that one counts for, if it makes a tensor of the family from something else."""
NOT_AGAIN = 2
"""After a suspicion that came to nothing, so many times more steps must make longer tensors before the next."""
MOST_LENGTHS = 64
"""Lengths of one family in one step that are looked at."""
MOST_FAMILIES = 4096


class Family(NamedTuple):
    """Tensors that differ in the length of one dimension only."""

    group: Group
    others: tuple[int, ...]
    axis: int


def families(group: Group, shape: tuple[int, ...]) -> list[tuple[Family, int]]:
    """Return the families of a tensor, each with its length."""
    return [
        (Family(group, (*shape[:axis], *shape[axis + 1 :]), axis), length)
        for axis, length in enumerate(shape)
    ]


def longest_runs(runs: Mapping[int, int], lengths: Iterable[int]) -> dict[int, int]:
    """Return, by length of a step's tensors, in how many steps in a row there was a longer tensor than in the one before.

    Args:
        runs: the same for the step before.
        lengths: of this step.
    """
    return {
        length: 1 + max((steps for before, steps in runs.items() if before < length), default=0)
        for length in lengths
    }


@dataclass(kw_only=True)
class Watched:
    """What is known of a family.

    Attributes:
        runs: see `longest_runs`.
        needed: steps in a row after which it is suspicious.
    """

    runs: dict[int, int] = field(default_factory=dict)
    needed: int = SUSPICIOUS


@dataclass(frozen=True, kw_only=True)
class Grown:
    """A tensor that was made from shorter ones of earlier steps.

    Attributes:
        entry: its storage.
        first_step: in which the first of them was made that was recorded.
        first_bytes: of that one.
        steps: in how many steps a longer one has replaced the last.
    """

    entry: StorageEntry
    first_step: int
    first_bytes: int
    steps: int


class GrowingTensors:
    """Watches for tensors that are replaced by longer ones.

    Attributes:
        wanted: groups whose tensors must be recorded in the next step.
    """

    def __init__(self) -> None:
        self.wanted: set[Group] = set()
        self._watched: dict[Family, Watched] = {}
        self._recorded: dict[Family, int] = {}
        self._grown: dict[int, Grown] = {}

    def step_ended(
        self,
        step: int,
        first: int,
        entries: Iterable[StorageEntry],
        origins: Mapping[int, StorageEntry],
        *,
        recorded: bool,
    ) -> list[Grown]:
        """Return tensors that have grown in enough steps.

        Args:
            step: that has ended.
            first: the first one that was looked at.
            entries: storages that are alive.
            origins: by storage of this step, that of an earlier step from which it was made.
            recorded: whether that was recorded in this step.
        """
        if step < first + FIRST_STEPS:
            return []
        born: dict[Family, set[int]] = {}
        grown = {key: one for key, one in self._grown.items() if one.entry() is not None}
        progress: set[Family] = set()
        for entry in entries:
            if entry.born != step:
                continue
            for family, length in families(entry.group, entry.shape):
                lengths = born.setdefault(family, set())
                if len(lengths) < MOST_LENGTHS:
                    lengths.add(length)
            longer = self._grown_from(entry, origins.get(entry.key))
            if longer is not None:
                grown[entry.key] = longer
                if longer.steps > 1:  # the batch of a loader is made longer once
                    progress.update(family for family, _ in families(entry.group, entry.shape))
        self._grown = grown if recorded else {}
        for family, lengths in born.items():
            watched = self._watched.setdefault(family, Watched())
            watched.runs = longest_runs(watched.runs, lengths)
        if recorded:
            self._count(born.keys(), progress)
        for family in born:
            watched = self._watched[family]
            if family not in self._recorded and max(watched.runs.values()) >= watched.needed:
                self._recorded[family] = RECORDED_STEPS
        self._forget()
        self.wanted = {family.group for family in self._recorded}
        return [one for one in grown.values() if one.entry.born == step and one.steps >= ENOUGH]

    def judged(self, grown: Grown, *, bounded: bool) -> None:
        """Look at a tensor no longer, because it was reported, or until it has grown for much longer, because code bounds it."""
        self._grown.pop(grown.entry.key, None)
        for family, _ in families(grown.entry.group, grown.entry.shape):
            self._recorded.pop(family, None)
            watched = self._watched.setdefault(family, Watched())
            steps = max(watched.runs.values(), default=0)
            enough = ENOUGH_IF_BOUNDED if bounded else NOT_AGAIN * ENOUGH_IF_BOUNDED
            watched.needed = enough if steps < enough else NOT_AGAIN * steps
        self.wanted = {family.group for family in self._recorded}

    def has_grown(self, grown: Grown) -> int:
        """Return in how many steps in a row there was a longer tensor of the same kind."""
        return max(
            (
                self._watched[family].runs.get(length, 0)
                for family, length in families(grown.entry.group, grown.entry.shape)
                if family in self._watched
            ),
            default=0,
        )

    def _grown_from(self, entry: StorageEntry, origin: StorageEntry | None) -> Grown | None:
        """Return how a tensor has grown: made from one that is freed, and longer in one dimension."""
        if origin is None or entry.bytes - origin.bytes < SMALLEST_BYTES or origin() is not None:
            return None
        pairs = zip(origin.shape, entry.shape, strict=False)
        if origin.group != entry.group or [new > old for old, new in pairs if old != new] != [True]:
            return None
        before = self._grown.get(origin.key)
        if before is None or before.entry is not origin:
            return Grown(entry=entry, first_step=origin.born, first_bytes=origin.bytes, steps=1)
        return Grown(
            entry=entry, first_step=before.first_step, first_bytes=before.first_bytes, steps=before.steps + 1
        )

    def _count(self, born: Iterable[Family], progress: set[Family]) -> None:
        """Count a recorded step for each suspicion, and end those that have come to nothing."""
        made = set(born)
        for family in list(self._recorded):
            if family in progress:
                self._recorded[family] = RECORDED_STEPS
                continue
            self._recorded[family] -= IN_VAIN if family in made else 1
            if self._recorded[family] <= 0:
                del self._recorded[family]
                watched = self._watched[family]
                watched.needed = max(ENOUGH, NOT_AGAIN * max(watched.runs.values(), default=0))

    def _forget(self) -> None:
        if len(self._watched) > MOST_FAMILIES:
            for family in [one for one in self._watched if one not in self._recorded][: MOST_FAMILIES // 2]:
                del self._watched[family]
