"""From an object to those that refer to it, and back to what it holds, through `gc`.

Used by `_holders.py`. Local variables of running functions are no objects that `gc` knows, so they are looked
up in the frames of all threads. Holds nothing after a call.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, GeneratorType, ModuleType
from typing import Any

from grpo_run.watchdog.evidence.source import OUR_FOLDERS

MOST_REFERRERS = 48
"""Objects of one level; each is compared with all references of the process."""
MOST_LEVELS = 10
OPTIMIZED = 1
"""`CO_OPTIMIZED` of a code object: its local variables are not a dictionary of a module or class."""
OWN_REFERENCES = 3
"""References to the copy of a frame's variables before Python 3.13: of the frame, ours, and of `getrefcount`.
With more of them the script has called `locals()` and keeps the copy."""


def running_locals() -> dict[int, tuple[str, CodeType]]:
    """Return the local variables of the script's and libraries' running functions, by the object's id.

    No function may hold its own frame: that is a cycle, which would keep what its callers hold.
    """
    found: dict[int, tuple[str, CodeType]] = {}
    others = sys._current_frames()
    others.pop(threading.get_ident(), None)
    for frame in [*others.values(), sys._getframe(1)]:
        above: FrameType | None = frame
        while above is not None:
            code = above.f_code
            if code.co_flags & OPTIMIZED and not code.co_filename.startswith(OUR_FOLDERS):
                for name, identity in _identities_of_locals(above):
                    if name != "self":
                        found.setdefault(identity, (name, code))
            above = above.f_back
    return found


def _identities_of_locals(frame: FrameType) -> list[tuple[str, int]]:
    """Return the names of a function's local variables with the ids of their values. Keeps none alive."""
    values = frame.f_locals
    found = [(name, id(value)) for name, value in list(values.items())]
    if sys.version_info < (3, 13) and sys.getrefcount(values) <= OWN_REFERENCES:
        values.clear()  # a copy, which would keep them alive until the function returns
    return found


def referrers(targets: Collection[Any], ignored: set[int]) -> list[Any]:
    """Return what refers to any of the targets, without frames that run, our own objects and what is ignored.

    Args:
        ignored: ids of objects that are left out; those found are added to it.
    """
    above = gc.get_referrers(*targets)
    found = [one for one in above if id(one) not in ignored and one is not targets and not _is_ours(one)]
    ignored.update(map(id, found))
    return found[:MOST_REFERRERS]


def levels(start: Collection[Any], ignored: Iterable[int] = ()) -> Iterator[list[Any]]:
    """Yield the referrers of some objects, then those of these, and so on up to modules and classes."""
    left_out = {*ignored, *map(id, start)}
    level = list(start)
    for _ in range(MOST_LEVELS):
        level = referrers(level, left_out)
        left_out.add(id(level))
        if not level:
            return
        yield level
        level = [one for one in level if not is_namespace(one) and not isinstance(one, (type, ModuleType))]


def is_namespace(candidate: Any) -> bool:
    """Whether an object is the dictionary of a module."""
    return type(candidate) is dict and "__builtins__" in candidate and "__name__" in candidate


def reached(start: Any, kinds: Collection[type], most: int) -> list[Any]:
    """Return the objects of some classes that an object holds, directly or through others.

    Does not enter modules, classes, functions, and objects with parameters such as models and optimizers.

    Args:
        most: how many objects are looked at.
    """
    seen = {id(start)}
    waiting = [start]
    found: list[Any] = []
    while waiting and len(seen) < most:
        for part in gc.get_referents(waiting.pop()):
            if id(part) in seen:
                continue
            seen.add(id(part))
            if type(part) in kinds:
                found.append(part)
            elif gc.is_tracked(part) and not _is_closed(part):
                waiting.append(part)
    return found


def _is_closed(part: Any) -> bool:
    return (
        isinstance(part, (type, ModuleType, FunctionType, CodeType))
        or is_namespace(part)
        or (hasattr(type(part), "parameters") or hasattr(type(part), "param_groups"))
    )


def attributes(owner: Any) -> Mapping[str, Any]:
    """Return the attributes of an instance or a class, without running code of its class."""
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, Mapping) else {}


def _is_ours(candidate: Any) -> bool:
    if isinstance(candidate, FrameType):
        return candidate.f_code.co_filename.startswith(OUR_FOLDERS)
    # of this package, while it looks: what it holds would hold it in turn
    if isinstance(candidate, GeneratorType):
        return candidate.gi_code.co_filename.startswith(OUR_FOLDERS)
    return str(type(candidate).__module__).startswith(("grpo_run.runtime.features.memory_trace", "weakref"))
