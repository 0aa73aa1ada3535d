"""The object that accumulates tensors: the nearest above a tensor that also holds those of other steps.

Used by `tracer.py` for tensors of a suspicious group. A holder is proved from both sides: it is reached from
the tensor through its referrers, and the tensors of the other steps are reached from it. Whether it grows is
decided elsewhere.
"""

from __future__ import annotations

from collections import UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from types import CellType
from typing import Any

from grpo_run.runtime.rank.memory_trace._names import Name, name_of
from grpo_run.runtime.rank.memory_trace._referrers import (
    is_namespace,
    levels,
    reached,
    referrers,
    running_locals,
)

MOST_HELD = 50_000
"""Objects that are looked at below a possible holder."""
MOST_ITEMS, MOST_OF_ITEM = 64, 1000
"""Items of a possible holder, the last ones, and objects of each of them that are looked at."""
FEWEST_ITEMS = 3
"""Items with tensors that a container must have."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque, UserDict, UserList)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """An object that holds tensors.

    Attributes:
        identity: the object's id.
        name: None if the script has none for it.
        kind: its class.
        tensors: what it holds.
        limited: whether it cannot hold more than a number that it was made with.
        ends_graph: whether it is a tensor, whose own autograd graph has saved the others.
    """

    identity: int
    name: Name | None
    kind: str
    tensors: list[Any]
    limited: bool = False
    ends_graph: bool = False

    @property
    def same(self) -> object:
        """Equal for what a script puts into a new container of the same name."""
        return self.identity if self.name is None or self.name.inside else self.name.variable


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
    for one in tensors:
        alone = [one]
        if holds_enough(alone):
            name = name_of(one, running_locals(), {*left_out, id(alone)})
            return Holder(
                identity=id(one), name=name, kind=type(one).__name__, tensors=alone, ends_graph=True
            )
    for level in levels(tensors, left_out):
        for candidate in level:
            if not _can_hold(candidate, {*left_out, id(level)}):
                continue
            held = reached(candidate, kinds, MOST_HELD)
            if holds_enough(held) and _is_in_many_items(candidate, kinds):
                return Holder(
                    identity=id(candidate),
                    name=name_of(candidate, running_locals(), (*left_out, id(level), id(held))),
                    kind=type(candidate).__name__,
                    tensors=held,
                    limited=isinstance(candidate, deque) and candidate.maxlen is not None,
                )
            del held  # which would be among the referrers of the next level
    return None


def _is_in_many_items(candidate: Any, kinds: Collection[type]) -> bool:
    """Whether several items of a container have tensors.

    A list of two callbacks reaches what both of them keep, and has got none of it.
    """
    if isinstance(candidate, tuple):
        return True
    data = candidate.data if isinstance(candidate, (UserDict, UserList)) else candidate
    items = list(dict.items(data)) if isinstance(data, dict) else [(one,) for one in data]
    return sum(1 for one in items[-MOST_ITEMS:] if reached(one, kinds, MOST_OF_ITEM)) >= FEWEST_ITEMS


def _can_hold(candidate: Any, ignored: set[int]) -> bool:
    """Whether an object may accumulate others.

    An instance such as a trainer reaches tensors of many steps without holding too many of any kind.
    """
    if type(candidate) is dict:
        if is_namespace(candidate):
            return False
        owners = referrers([candidate], {*ignored})
        return not any(getattr(owner, "__dict__", None) is candidate for owner in owners)
    # what a function has captured is as many objects as it was made with
    captured = type(candidate) is tuple and candidate and all(type(one) is CellType for one in candidate)
    return isinstance(candidate, CONTAINERS) and not captured
