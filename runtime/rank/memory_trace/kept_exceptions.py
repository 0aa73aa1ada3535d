"""Kept exceptions that hold the local variables of functions which have ended, step by step. Used by `tracer.py`."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import NamedTuple

from grpo_run.runtime.rank.memory_trace import growth, making
from grpo_run.runtime.rank.memory_trace.census import Census, Group, storage_of, tensor_types
from grpo_run.runtime.rank.memory_trace.finding import TraceFinding
from grpo_run.runtime.rank.memory_trace.ledger import Ledger
from grpo_run.runtime.rank.memory_trace.tracebacks import KeptFrame, exception_of, kept_frames


class KeptException(NamedTuple):
    """A line at which exceptions were raised that something keeps.

    Args:
        place: file and line.
        groups: of the tensors that it holds.
        finding: None before it has been there in enough steps.
    """

    place: tuple[str, int]
    groups: set[Group]
    finding: TraceFinding | None


class KeptExceptions:
    """Counts in how many steps exceptions of each line were kept."""

    def __init__(self) -> None:
        self._steps: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._found: set[tuple[str, int]] = set()

    def step_ended(self, step: int, census: Census, ledger: Ledger) -> list[KeptException]:
        """Return what was kept in several steps, each line with its finding once."""
        kept = kept_frames(census.tracebacks, tensor_types(sys.modules["torch"]))
        by_place: dict[tuple[str, int], list[KeptFrame]] = defaultdict(list)
        for one in kept:
            by_place[one.file, one.line].append(one)
        found = []
        for place, frames in by_place.items():
            entries = ledger.of(
                {
                    storage._cdata
                    for frame in frames
                    for tensor in frame.tensors
                    if not tensor.requires_grad or tensor.grad_fn is not None
                    if (storage := storage_of(tensor)) is not None
                }
            )
            if not entries:
                continue
            steps = self._steps[place]
            steps.add(step)
            if len(steps) < growth.SUSPICIOUS:
                continue
            finding = None
            if len(steps) >= growth.ENOUGH and place not in self._found:
                self._found.add(place)
                ours = {*census.identities(), *map(id, (frames, kept))}
                error, name = exception_of(frames[0].traceback, ours)
                finding = making.of_traceback(frames[0], error, name, entries, len(steps))
            for entry in entries:
                entry.settled = True
            found.append(KeptException(place, {one.group for one in entries}, finding))
        return found
