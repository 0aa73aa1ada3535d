"""Tensors that Python's garbage collector frees: only a reference cycle has held them.

Used by `tracer.py`. A callback of `gc` notes which young tensors are alive before a collection and which of them are gone after it.
Once that has happened in several steps, the cycle of such a tensor is looked for before the next collection.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.rank.memory_trace.census import Group, group_of, storage_of
from grpo_run.runtime.rank.memory_trace.cycles import Cycle, find_cycle
from grpo_run.runtime.rank.memory_trace.growth import SUSPICIOUS

SHARE = 0.2
"""What looking at collections may take of the time. Collections of young objects are frequent, and each takes 30 to 100 µs more."""
EXAMINED = 2
"""Tensors of one collection whose cycle is found, at most."""


@dataclass(kw_only=True)
class Collected:
    """What collections have freed of one group.

    Attributes:
        steps: in which something was made that was freed.
        tensors, bytes: how many storages, and how large they were.
        shape: of the last.
        cycles: by what was found to hold such tensors, in which steps.
        keys: storages whose cycle was proved last.
    """

    steps: set[int] = field(default_factory=set)
    tensors: int = 0
    bytes: int = 0
    shape: tuple[int, ...] = ()
    cycles: dict[Cycle, set[int]] = field(default_factory=lambda: defaultdict(set))
    keys: set[int] = field(default_factory=set)


class CollectedTensors:
    """Watches the collections of this process.

    Attributes:
        kinds: classes of tensors; nothing is watched while it is empty.
        groups: what was freed so far.

    Args:
        step_of: returns the step in which a storage was made, by its key.
        note: called with the storages whose cycle was proved, before they are freed.
        clock: seconds.
    """

    def __init__(
        self,
        step_of: Callable[[int], int],
        note: Callable[[Group, int], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kinds: Collection[type] = ()
        self.groups: dict[Group, Collected] = defaultdict(Collected)
        self._step_of = step_of
        self._note = note
        self._clock = clock
        self._began = clock()
        self._spent = 0.0
        self._watched: list[tuple[weakref.ref[Any], Group, int, int, tuple[int, ...]]] = []

    def begin(self) -> None:
        """Watch from now on."""
        gc.callbacks.append(self._collects)

    def end(self) -> None:
        """Watch no longer."""
        if self._collects in gc.callbacks:
            gc.callbacks.remove(self._collects)
        self._watched.clear()

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if not self.kinds:
            return
        began = self._clock()
        if phase == "stop":
            self._look_after()
        elif self._spent <= SHARE * (began - self._began):
            self._look_before(info["generation"])
        self._spent += self._clock() - began

    def _look_before(self, generation: int) -> None:
        self._watched.clear()
        examined = 0
        tensors = [
            one
            for young in range(generation + 1)
            for one in gc.get_objects(generation=young)
            if type(one) in self.kinds
        ]
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is None:
                continue
            group = group_of(tensor)
            size, shape = int(storage.nbytes()), tuple(tensor.shape)
            step = self._step_of(storage._cdata)
            self._watched.append((weakref.ref(storage), group, step, size, shape))
            if group in self.groups and len(self.groups[group].steps) >= SUSPICIOUS and examined < EXAMINED:
                cycle = find_cycle(tensor, {id(tensors)})
                if cycle is not None:
                    examined += 1
                    self.groups[group].cycles[cycle].add(step)
                    self._note(group, storage._cdata)

    def _look_after(self) -> None:
        for reference, group, step, size, shape in self._watched:
            if reference() is None:
                collected = self.groups[group]
                collected.steps.add(step)
                collected.tensors += 1
                collected.bytes += size
                collected.shape = shape
        self._watched.clear()
