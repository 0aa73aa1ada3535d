"""The memory trace of one rank: which tensors are alive after each step, and since when.

Made by `rank.py`. The rule: a container that holds tensors of `MANY_STEPS` different steps is reported, once.
`_holders.py` finds it. `gc` lists what is alive, without what existed before the fork, which is frozen. What
only an autograd graph holds is no object that `gc` knows; the tensor at the end of the graph is. Tensors are
held weakly, and nothing is changed.
"""

from __future__ import annotations

import gc
import os
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.features.memory_trace._holders import Holder, find_holder
from grpo_run.runtime.features.memory_trace.events import MemoryFound
from grpo_run.watchdog.text import size_text

MANY_STEPS = 20
"""A buffer with rollouts of fewer steps is usual."""
SMALLEST_BYTES = 128
"""Storages below are left out unless they end a graph: numbers that a script logs."""
SHARE = 1.0
"""What the trace may take in addition to the time of the steps; if it takes more, steps are left out."""
MOST_SOURCES = 100
"""Tensors whose holder is looked for at once: of each step one of each size."""
MOST_FINDINGS = 20


@dataclass(kw_only=True)
class _Alive:
    """A tensor that was alive after a step.

    Attributes:
        born: the step after which it was first seen.
        settled: whether its holder was looked for.
    """

    reference: weakref.ref[Any]
    born: int
    bytes: int
    settled: bool = False


class MemoryTrace:
    """The trace of one rank. Used by the thread that trains.

    Args:
        report: called with each finding, once.
        warn: called with one line if the trace itself fails, and ends.
    """

    def __init__(self, report: Callable[[MemoryFound], None], warn: Callable[[str], None]) -> None:
        self._report, self._warn = report, warn
        self._alive: dict[int, _Alive] = {}
        self._reported: set[str] = set()
        self._next_look = 0.0
        self._failed = False

    def step_ended(self, step: int) -> None:
        """Look at what is alive after a step."""
        began = time.perf_counter()
        if self._failed or began < self._next_look or "torch" not in sys.modules:
            return
        try:
            self._look(step)
        except Exception as error:  # noqa: BLE001 - the script's run is worth more than its trace
            self._failed = True
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._warn(
                f"--memory-trace has failed and ends; the run goes on: {type(error).__name__}: {error}"
                f" ({os.path.basename(place.filename)}:{place.lineno})"
            )
        ended = time.perf_counter()
        self._next_look = ended + (ended - began) / SHARE

    def _look(self, step: int) -> None:
        tensor_class = sys.modules["torch"].Tensor
        before, self._alive = self._alive, {}
        for one in gc.get_objects():
            if type(one) is tensor_class and (size := _size_of(one)) is not None:
                known = before.get(id(one))
                if known is None or known.reference() is not one:
                    known = _Alive(reference=weakref.ref(one), born=step, bytes=size)
                self._alive[id(one)] = known
        del one
        waiting = [known for known in self._alive.values() if not known.settled]
        if len({known.born for known in waiting}) < MANY_STEPS:
            return
        kinds = {(known.born, known.bytes): known for known in waiting}
        oldest = [kinds[kind] for kind in sorted(kinds)[:MOST_SOURCES]]
        holder = find_holder([known.reference() for known in oldest], self._is_many)
        if holder is not None:
            self._found(holder)
            return
        for known in oldest:  # held by none; the others are asked for at the next look
            known.settled = True

    def _is_many(self, tensors: Collection[Any]) -> bool:
        """Whether tensors are those of many steps, without those of holders that were found."""
        known = (self._alive.get(id(one)) for one in tensors)
        return len({one.born for one in known if one is not None and not one.settled}) >= MANY_STEPS

    def _found(self, holder: Holder) -> None:
        """Report a holder, unless one of the same name was reported."""
        tensors = [one for one in holder.tensors if id(one) in self._alive]
        held = [self._alive[id(one)] for one in tensors]
        for known in held:
            known.settled = True
        if holder.name in self._reported or len(self._reported) >= MOST_FINDINGS:
            return
        self._reported.add(holder.name)
        sizes = {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}
        steps, since = len({known.born for known in held}), min(known.born for known in held)
        newest = max(tensors, key=lambda one: self._alive[id(one)].born)
        kind = f"{list(newest.shape)} {str(newest.dtype).removeprefix('torch.')}"
        graphs = any(one.grad_fn is not None for one in tensors)
        advice = "detach what it keeps, because its graphs keep more" if graphs else "bound it, or keep less"
        self._report(
            MemoryFound(
                key=holder.name, world_size=1, tensors=len(held), bytes=sum(sizes.values()), steps=steps,
                since_step=since,
                sentence=f"{holder.name} holds {len(held):,} tensors ({size_text(sum(sizes.values()))}) of"
                f" {steps} steps since step {since}, the newest {kind}: if that does not end, {advice}",
            )
        )  # fmt: skip


def _size_of(tensor: Any) -> int | None:
    """Return the size of a tensor that counts; None for others."""
    try:
        size = int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):  # no storage, as of a sparse or an opaque tensor
        return None
    return size if size >= SMALLEST_BYTES or tensor.grad_fn is not None else None
