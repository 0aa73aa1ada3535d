"""A finding of the memory trace: the rule that makes it, and its sentence.

The rule: a holder has tensors of several steps after the first ones, and if most of that was saved by
autograd graphs of 5 steps, it is an alarm. Otherwise it must have grown at every look and have tensors of 20
steps: that is a notice, because a buffer that is not full looks the same as a leak. It is an alarm once it
takes a tenth of the memory and will not fit at its rate until the run ends.

A finding is the event that a rank writes to the journal. The terminal, the status and the reports show the
sentence from there. Plain data and pure functions.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

from grpo_run.runtime.features.memory_trace._census import StorageEntry
from grpo_run.runtime.features.memory_trace._holders import Holder
from grpo_run.runtime.features.memory_trace.events import NOTICE, MemoryFound, Site
from grpo_run.watchdog.evidence.source import is_outside_frameworks
from grpo_run.watchdog.text import size_text

SUSPICIOUS = 3
"""Steps whose tensors are still alive before it is recorded where such tensors are made."""
ENOUGH = 5
"""Steps whose graphs must be alive before their holder is looked for."""
LOOKED_AT = 10
"""Steps whose tensors must be alive before their holder is looked for, and again for each look at it. Shorter
lists are the items of longer ones."""
GROWING = 20
"""Steps of which a holder must have tensors before it is reported that it grows."""
KEPT_SHARE = 0.75
"""Of what was made since an earlier look, how much a holder must have gained; the rest has replaced some."""
CONSIDERABLE = 0.1
"""Share of the memory that was free before it grew, which something must take before it is an alarm."""


class Gain(NamedTuple):
    """How much something has grown.

    Args:
        held_bytes: what it takes now.
        gained_bytes: how much of that is new.
        steps: that have passed since then.
    """

    held_bytes: int
    gained_bytes: int
    steps: int

    def outgrows(self, *, steps_left: int, free_bytes: int) -> dict[str, int]:
        """Return the figures if it already takes a considerable share of the memory and does not fit until
        the run ends; nothing otherwise.

        Args:
            steps_left: of the run; 0 if not known. Nothing is foreseen then.
            free_bytes: of the memory that it is in; 0 if not known.
        """
        considerable = self.held_bytes >= CONSIDERABLE * (free_bytes + self.held_bytes)
        if not (free_bytes and considerable and self.gained_bytes * steps_left > free_bytes * self.steps):
            return {}
        rate = self.gained_bytes // self.steps
        return {"bytes_a_step": rate, "steps_left": steps_left, "free_bytes": free_bytes}


class HolderSizes:
    """The sizes of one holder, each time it was looked at."""

    def __init__(self) -> None:
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None

    def look(self, step: int, held: Collection[tuple[int, int]]) -> Gain | None:
        """Return how much the holder has grown without a break; None if it has not since the last look.

        Args:
            step: that has ended.
            held: step and bytes of each storage in it.
        """
        last, total = self._last, sum(size for _, size in held)
        self._last = step, total
        made = sum(size for born, size in held if last is not None and born > last[0])
        if last is None or self._first is None or not made or total - last[1] < KEPT_SHARE * made:
            self._first = self._last
            return None
        return Gain(total, total - self._first[1], step - self._first[0])


def of_holder(
    holder: Holder, held: Collection[StorageEntry], kind: str, details: dict[str, int], directory: str
) -> MemoryFound:
    """Return what a holder keeps; of several kinds of tensors, the one that takes most is shown.

    Args:
        held: storages that the holder keeps, or those that its graph has saved.
        kind: `growing`, `growth` or `graph`.
        details: of the growth.
        directory: the working directory. Paths below it are shown relative to it.
    """
    groups: dict[tuple[str, int], list[StorageEntry]] = defaultdict(list)
    for one in held:
        groups[one.dtype, len(one.shape)].append(one)
    shown = max(groups.values(), key=lambda alike: sum(one.bytes for one in alike))
    newest = max(shown, key=lambda one: (one.born, one.bytes))
    sites = Counter(one.site for one in shown if one.site is not None)
    made_at = sites.most_common(1)[0][0] if sites else None
    held_at = holder.name.site if holder.name is not None else None
    if held_at is not None and not is_outside_frameworks(held_at.file):
        held_at = None
    begins = held_at or made_at or Site("")
    found = MemoryFound(
        kind=kind, tensors=len(shown), bytes=sum(one.bytes for one in shown), shape=newest.shape,
        dtype=newest.dtype, since_step=min(one.born for one in shown),
        steps=len({one.born for one in shown}), made_at=made_at, holder=str(holder), held_at=held_at,
        details=details, key=f"{kind}|{holder}|{begins.file}|{begins.line}", world_size=1, subject="",
        sentence="",
    )  # fmt: skip
    describe(found, directory)
    return found


ADVICE = {
    "growing": "it has kept tensors of {steps} steps; cannot tell whether that ends",
    "growth": (
        "it has kept tensors of {steps} steps, {rate} a step, which does not fit into {free} for the"
        " {steps_left} steps that are left; bound it, or keep less"
    ),
    "graph": (
        "nothing has run backward through it in {steps} steps; compute it under torch.no_grad(), or detach it"
    ),
}


def describe(found: MemoryFound, directory: str) -> None:
    """Write the subject of a finding, and its sentence: what, since when, made where, held by whom, and what
    follows.

    Args:
        directory: as of `of_holder`.
    """
    at = f" ({_place(found.held_at, directory)})" if found.held_at is not None else ""
    saved = "saved by an autograd graph that is " if found.kind == "graph" else ""
    found.subject = f"{saved}held by {found.holder}{at}"
    figures = found.details
    shape = "[" + ", ".join(map(str, found.shape)) + "]"
    advice = ADVICE[found.kind].format(
        steps=found.steps, rate=size_text(figures.get("bytes_a_step", 0)),
        free=size_text(figures.get("free_bytes", 0)), steps_left=figures.get("steps_left", 0),
    )  # fmt: skip
    found.sentence = (
        f"{'still growing: ' if found.kind == NOTICE else ''}{found.tensors:,}"
        f" tensor{'s' * (found.tensors != 1)} {shape} {found.dtype} ({size_text(found.bytes)}) alive since"
        f" step {found.since_step},"
        f"{f' made at {_place(found.made_at, directory)},' if found.made_at is not None else ''}"
        f" {found.subject}: {advice}"
    )


def _place(one: Site, directory: str) -> str:
    """Return a place as `file.py:12`."""
    file = os.path.relpath(one.file, directory) if one.file.startswith(f"{directory}/") else one.file
    for folder in ("/site-packages/", "/dist-packages/"):
        file = file.rpartition(folder)[2]
    return file if one.line is None else f"{file}:{one.line}"
