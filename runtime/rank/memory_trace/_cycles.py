"""Reference cycles that hold tensors until Python collects garbage, which training does rarely.

Used by `tracer.py`. `find_cycle` proves that only a cycle holds something: nothing outside of it refers to
it. `CollectedTensors` watches the collections of the process: a callback of `gc` notes which young tensors
are alive before one and which of them are gone after it. Once that has happened in several steps, the cycle
of such a tensor is looked for before the next collection. Frees nothing.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from grpo_run.runtime.rank.memory_trace._census import Group, Site, group_of, storage_of
from grpo_run.runtime.rank.memory_trace._growth import ENOUGH, SUSPICIOUS
from grpo_run.runtime.rank.memory_trace._names import file_of, first_line
from grpo_run.runtime.rank.memory_trace._referrers import attributes, is_namespace, referrers, running_locals
from grpo_run.watchdog.evidence.source import is_user_file

MOST_OBJECTS = 400
"""A cycle with more objects above it is not examined."""
SHARE = 0.2
"""What looking at collections may take of the time. Those of young objects take 30 to 100 µs more."""
EXAMINED = 2
"""Tensors of one collection whose cycle is found, at most."""
PROVED_STEPS = 2
"""Steps in which the same cycle must have been found to hold tensors that a collection frees."""


@contextlib.contextmanager
def collections_postponed() -> Iterator[None]:
    """Let Python collect no garbage on its own within the context."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Cycle(NamedTuple):
    """A reference cycle.

    Args:
        kind: class of an object in it, or the name of a function.
        attribute: of that object, through which it refers to itself or to the next object; None if there is
            none.
        file: where the class or function is from; empty if that is not known.
        line: where the function or the `__init__` of the class begins; None if there is none.
    """

    kind: str
    attribute: str | None
    file: str
    line: int | None


def find_cycle(start: Any, ignored: Iterable[int]) -> Cycle | None:
    """Return the cycle that alone holds an object; None if something else holds it, or nothing does.

    Args:
        start: a tensor.
        ignored: ids of objects that are no holders: those through which the caller has it.
    """
    objects = _all_above(start, {*ignored, id(start)})
    if not objects:
        return None
    if _held_from_outside(objects) or not running_locals().keys().isdisjoint(map(id, objects)):
        return None
    inside = {id(one) for one in objects}
    edges = {id(one): [part for part in gc.get_referents(one) if id(part) in inside] for one in objects}
    in_cycle = [one for one in objects if _reaches_itself(one, edges)]
    named = [one for one in in_cycle if not isinstance(one, (dict, list, tuple, set, type))]
    if not in_cycle:
        return None
    return _describe(min(named or in_cycle[:1], key=_library_last), in_cycle)


def _all_above(start: Any, ignored: set[int]) -> list[Any]:
    found: list[Any] = []
    level = [start]
    while level:
        ignored |= {id(found), id(level)}
        level = referrers(level, ignored)
        if len(found) + len(level) > MOST_OBJECTS or any(
            is_namespace(one) or isinstance(one, (ModuleType, type)) for one in level
        ):
            return []
        found.extend(level)
    return found


def _held_from_outside(objects: list[Any]) -> bool:
    """Whether an object has more references than those from the others."""
    inside = {id(one) for one in objects}
    references = Counter(id(part) for one in objects for part in gc.get_referents(one) if id(part) in inside)
    probe = [object()]
    own = max(sys.getrefcount(one) for one in probe)
    # an attribute dictionary inside its instance is referred to without a count
    return any(sys.getrefcount(one) - own > references[id(one)] for one in objects)


def _reaches_itself(start: Any, edges: dict[int, list[Any]]) -> bool:
    seen: set[int] = set()
    waiting = list(edges[id(start)])
    while waiting:
        one = waiting.pop()
        if one is start:
            return True
        if id(one) not in seen:
            seen.add(id(one))
            waiting.extend(edges[id(one)])
    return False


def _library_last(candidate: Any) -> tuple[bool, bool]:
    return not is_user_file(_file_of(candidate)), isinstance(candidate, (FunctionType, FrameType))


def _file_of(candidate: Any) -> str:
    code = getattr(candidate, "__code__", None) or getattr(candidate, "f_code", None)
    return str(code.co_filename) if code is not None else file_of(type(candidate))


def _describe(candidate: Any, in_cycle: list[Any]) -> Cycle:
    file = _file_of(candidate)
    if isinstance(candidate, FunctionType):
        return Cycle(candidate.__qualname__, None, file, candidate.__code__.co_firstlineno)
    inside = {id(one) for one in in_cycle}
    kind = type(candidate).__name__
    attribute = next((name for name, value in attributes(candidate).items() if id(value) in inside), None)
    return Cycle(kind, attribute, file, first_line(type(candidate), file))


@dataclass(kw_only=True)
class Collected:
    """What collections have freed of one group.

    Attributes:
        steps: in which something was made that was freed.
        tensors, bytes: how many storages, and how large they were.
        shape: of the last.
        cycles: by what was found to hold such tensors, in which steps.
        site: where one of them was made; None if that was not recorded.
    """

    steps: set[int] = field(default_factory=set)
    tensors: int = 0
    bytes: int = 0
    shape: tuple[int, ...] = ()
    cycles: dict[Cycle, set[int]] = field(default_factory=lambda: defaultdict(set))
    site: Site | None = None

    @property
    def proved(self) -> list[Cycle]:
        """The cycles that have held tensors of enough steps."""
        enough = len(self.steps) >= ENOUGH
        return [cycle for cycle, steps in self.cycles.items() if enough and len(steps) >= PROVED_STEPS]


class CollectedTensors:
    """Watches the collections of this process.

    Attributes:
        kinds: classes of tensors; nothing is watched while it is empty.
        groups: what was freed so far.

    Args:
        step_of: returns the step in which a storage was made, by its key.
        site_of: returns where a storage was made, if that is recorded at present.
        clock: seconds.
    """

    def __init__(
        self,
        step_of: Callable[[int], int],
        site_of: Callable[[int], Site | None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.kinds: Collection[type] = ()
        self.groups: dict[Group, Collected] = defaultdict(Collected)
        self._step_of, self._site_of, self._clock = step_of, site_of, clock
        self._began, self._spent = clock(), 0.0
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
            step, size = self._step_of(storage._cdata), int(storage.nbytes())
            self._watched.append((weakref.ref(storage), group, step, size, tuple(tensor.shape)))
            known = self.groups.get(group)
            if known is not None and len(known.steps) >= SUSPICIOUS and examined < EXAMINED:
                cycle = find_cycle(tensor, {id(tensors)})
                if cycle is not None:
                    examined += 1
                    known.cycles[cycle].add(step)
                    known.site = self._site_of(storage._cdata) or known.site

    def _look_after(self) -> None:
        for reference, group, step, size, shape in self._watched:
            if reference() is None:
                collected = self.groups[group]
                collected.steps.add(step)
                collected.tensors += 1
                collected.bytes += size
                collected.shape = shape
        self._watched.clear()
