"""The object that accumulates tensors: the nearest one above a tensor that also holds those of the steps before.

Used by `tracer.py` for tensors of a suspicious group. A holder is proved from both sides: it is reached from the tensor through its
referrers, and the tensors of the other steps are reached from it.
"""

from __future__ import annotations

import functools
import sys
from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

from grpo_run.trainers.memory_trace.holding.names import Name, name_of
from grpo_run.trainers.memory_trace.holding.referrers import (
    attributes,
    is_namespace,
    levels,
    reached,
    referrers,
    running_locals,
)
from grpo_run.trainers.memory_trace.holding.sources import is_bounded
from grpo_run.watchdog.evidence.source import is_outside_frameworks, is_user_file

MOST_HELD = 50_000
"""Objects that are looked at below a possible holder."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque, UserDict, UserList)
MOST_FILES = 64
"""Files of the script in which the use of an attribute is looked for."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """An object that holds tensors.

    Attributes:
        identity: the object's id.
        name: None if the script has none for it.
        kind: its class.
        tensors: what it holds.
        bounded: whether it has a bound, or its code removes, replaces or looks up what it holds.
    """

    identity: int
    name: Name | None
    kind: str
    tensors: list[Any]
    bounded: bool


def find_holder(
    tensors: Collection[Any],
    holds_enough: Callable[[list[Any]], bool],
    kinds: Collection[type],
    ignored: Iterable[int],
) -> Holder | None:
    """Return the nearest object above some tensors that holds enough others.

    Args:
        tensors: of one storage.
        holds_enough: whether tensors are those of enough steps.
        kinds: classes of tensors.
        ignored: ids of objects that are no holders.
    """
    left_out = {*ignored, id(tensors)}
    for level in levels(tensors, left_out):
        for candidate in level:
            if not _can_hold(candidate, {*left_out, id(level)}):
                continue
            held = reached(candidate, kinds, MOST_HELD)
            if holds_enough(held):
                variables = running_locals()
                ours = (*left_out, id(level), id(held))
                name = name_of(candidate, variables, ours)
                return Holder(
                    identity=id(candidate),
                    name=name,
                    kind=type(candidate).__name__,
                    tensors=held,
                    bounded=has_bound(candidate, name),
                )
    return None


def _can_hold(candidate: Any, ignored: set[int]) -> bool:
    """Whether an object may accumulate others: a container, or one of a chain of objects of one class.

    An instance such as a trainer reaches tensors of many steps without holding too many of any kind.
    """
    if type(candidate) is dict:
        if is_namespace(candidate):
            return False
        owners = referrers([candidate], {*ignored})
        return not any(getattr(owner, "__dict__", None) is candidate for owner in owners)
    if isinstance(candidate, CONTAINERS):
        return True
    return any(type(value) is type(candidate) for value in attributes(candidate).values())


def has_bound(candidate: Any, name: Name | None) -> bool:
    """Whether a holder has a bound, or its code removes, replaces or looks up what it holds."""
    if isinstance(candidate, deque) and candidate.maxlen is not None:
        return True
    if name is None:
        return False
    if not is_user_file(name.variable.file) and not is_outside_frameworks(name.variable.file):
        return True  # of torch: state of an optimizer that sees a parameter for the first time
    return is_bounded(name.variable, user_files())


def user_files() -> tuple[str, ...]:
    """Return the files of the script that are imported."""
    return _user_files(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _user_files(modules: int) -> tuple[str, ...]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return tuple(dict.fromkeys(file for file in files if file and is_user_file(file)))[:MOST_FILES]
