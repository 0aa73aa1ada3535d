"""The container that holds tensors of many steps, and its name.

Used by `_tracer.py`. From the tensors up through their referrers, the nearest container is taken from which
enough of them are reached. It is named by an attribute or variable that refers to it. Local variables of
running functions are no objects that `gc` knows, so they are looked up in the frames of all threads. Keeps
nothing alive.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple

from grpo_run.watchdog.evidence.source import LIBRARIES, OUR_FOLDERS, is_user_file

CONTAINERS = (list, dict, set, deque)
FEWEST_ITEMS = 3
"""Items with tensors that a container must have: a list of two callbacks has got none of what they keep."""
MOST_HELD = 50_000
"""Objects that are looked at below a possible holder."""
MOST_REFERRERS = 200
"""Objects of one level; each is compared with all references of the process."""
MOST_LEVELS = 10
NAMED_WITHIN = 5
"""Levels above an object in which a name is looked for."""
OPTIMIZED = 1
"""`CO_OPTIMIZED` of a code object: its local variables are not a dictionary of a module or class."""
OWN_REFERENCES = 3
"""References to the copy of a frame's variables before Python 3.13: of the frame, ours, and of `getrefcount`.
With more of them the script has called `locals()` and keeps the copy."""


class Holder(NamedTuple):
    """A container of the script.

    Args:
        name: class, variable, owner and place, as ``list `history` of Collector (train.py:40)``.
        tensors: that are reached from it.
    """

    name: str
    tensors: list[Any]


def find_holder(tensors: list[Any], enough: Callable[[Collection[Any]], bool]) -> Holder | None:
    """Return the nearest container with a name above some tensors that holds enough.

    Args:
        enough: whether tensors are those of many steps.
    """
    level, seen = tensors, {id(tensors), *map(id, tensors)}
    for _ in range(MOST_LEVELS):
        level = [one for one in _referrers(level, seen) if not isinstance(one, (type, ModuleType))]
        level = [one for one in level if not _is_namespace(one)]
        for candidate in level:
            if not isinstance(candidate, CONTAINERS):
                continue
            met = {id(candidate)}
            items = [found for item in gc.get_referents(candidate) if (found := _reached(item, met))]
            held = [one for found in items for one in found]
            if len(items) >= FEWEST_ITEMS and enough(held) and not _is_of_instance(candidate):
                name = name_of(candidate, {id(level)})
                if name is not None:  # a copy that is about to get its name has none
                    return Holder(name, held)
    return None


def _referrers(targets: Collection[Any], seen: set[int]) -> list[Any]:
    """Return what refers to any of the targets, without frames of ours and what was seen.

    Args:
        seen: ids; those found are added.
    """
    above = gc.get_referrers(*targets)
    found = [one for one in above if id(one) not in seen and one is not targets and not _is_our_frame(one)]
    seen.update(map(id, found))
    return found[:MOST_REFERRERS]


def _reached(start: Any, met: set[int]) -> list[Any]:
    """Return the tensors that an object is or holds. Does not enter modules, classes, functions, and objects
    with parameters such as models and optimizers.

    Args:
        met: ids of what is not entered again; added to.
    """
    tensor_class = sys.modules["torch"].Tensor
    waiting, found = [start], []
    while waiting and len(met) < MOST_HELD:
        one = waiting.pop()
        if id(one) in met or not gc.is_tracked(one):
            continue
        met.add(id(one))
        if type(one) is tensor_class:
            found.append(one)
        elif not (
            isinstance(one, (type, ModuleType, FunctionType, CodeType))
            or _is_namespace(one)
            or hasattr(type(one), "parameters")
            or hasattr(type(one), "param_groups")
        ):
            waiting.extend(gc.get_referents(one))
    return found


def name_of(named: Any, ignored: Collection[int] = ()) -> str | None:
    """Return the nearest name of an object with its place, and of several one in the script.

    Args:
        ignored: ids of objects that are no holders.
    """
    variables = running_locals()
    level, seen = [named], {id(named), *ignored}
    for depth in range(NAMED_WITHIN):
        names = []
        for one in level:
            within = f"{_kind(named)} in " if depth else ""
            for name, owner, file, line in _names(one, {*seen, id(level)}, variables):
                place = f" ({_shown(file)}{f':{line}' if line else ''})" if file else ""
                names.append((not is_user_file(file), f"{within}{_kind(one)} `{name}`{owner}{place}"))
        if names:
            return min(names, key=lambda one: one[0])[1]
        level = [one for one in _referrers(level, seen) if not _is_namespace(one)]
    return None


def _names(
    named: Any, ignored: set[int], variables: Mapping[int, tuple[str, CodeType]]
) -> Iterator[tuple[str, str, str, int]]:
    """Yield names of an object, each with its owner in words, its file, and where the owner begins there."""
    if id(named) in variables:
        name, code = variables[id(named)]
        yield name, f" in {code.co_name}()", code.co_filename, code.co_firstlineno
    parents = _referrers([named], {*ignored})
    for parent in parents:
        # the dictionary of attributes is an object of its own, or part of the instance
        owners = [parent]
        if type(parent) is dict and not _is_namespace(parent):
            owners = _referrers([parent], {*ignored, id(parents)})
        for owner in owners:
            values = owner if _is_namespace(owner) else _attributes(owner)
            for name in [name for name, value in list(values.items()) if value is named]:
                yield str(name), *_described(owner)


def _described(owner: Any) -> tuple[str, str, int]:
    """Return a class, function or module in words, its file, and where it begins; 0 if that is not known."""
    if _is_namespace(owner):
        return "", str(owner.get("__file__") or ""), 0
    kind = owner if isinstance(owner, (type, FunctionType)) else type(owner)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    code = getattr(kind.__dict__.get("__init__"), "__code__", None)
    # that of a dataclass is in no file
    line = code.co_firstlineno if code is not None and code.co_filename == file else 0
    return f" of {kind.__name__}", file or "", line


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


def _is_namespace(candidate: Any) -> bool:
    """Whether an object is the dictionary of a module."""
    return type(candidate) is dict and "__builtins__" in candidate and "__name__" in candidate


def _is_of_instance(candidate: Any) -> bool:
    """Whether an object is the dictionary of attributes of another one."""
    return type(candidate) is dict and any(
        _attributes(one) is candidate for one in gc.get_referrers(candidate)
    )


def _attributes(owner: Any) -> Mapping[str, Any]:
    """Return the attributes of an instance or a class, without running code of its class."""
    try:
        own = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return own if isinstance(own, Mapping) else {}


def _is_our_frame(candidate: Any) -> bool:
    return isinstance(candidate, FrameType) and candidate.f_code.co_filename.startswith(OUR_FOLDERS)


def _kind(one: Any) -> str:
    return type(one).__name__


def _shown(file: str) -> str:
    """Return a path relative to the working directory, or to the folder of installed packages."""
    here = f"{os.getcwd()}/"
    for folder in LIBRARIES:
        file = file.rpartition(folder)[2]
    return file.removeprefix(here)
