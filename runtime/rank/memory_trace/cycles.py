"""Proves that only a reference cycle holds something: nothing outside of it refers to it.

Used by `tracer.py`. Memory in a cycle stays until Python collects garbage, which training does rarely.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable
from types import FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from grpo_run.runtime.rank.memory_trace.names import first_line
from grpo_run.runtime.rank.memory_trace.referrers import attributes, is_namespace, referrers, running_locals
from grpo_run.watchdog.evidence.source import is_user_file

MOST_OBJECTS = 400
"""A cycle with more objects above it is not examined."""


class Cycle(NamedTuple):
    """A reference cycle.

    Args:
        kind: class of an object in it, or the name of a function.
        attribute: of that object, through which it refers to itself or to the next object; None if there is none.
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
    return _describe(min(named, key=_library_last) if named else in_cycle[0], in_cycle)


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
    if code is not None:
        return str(code.co_filename)
    module = sys.modules.get(str(type(candidate).__module__))
    return str(getattr(module, "__file__", None) or "")


def _describe(candidate: Any, in_cycle: list[Any]) -> Cycle:
    file = _file_of(candidate)
    if isinstance(candidate, FunctionType):
        return Cycle(candidate.__qualname__, None, file, candidate.__code__.co_firstlineno)
    inside = {id(one) for one in in_cycle}
    kind = type(candidate).__name__
    attribute = next((name for name, value in attributes(candidate).items() if id(value) in inside), None)
    return Cycle(kind, attribute, file, first_line(type(candidate), file))
