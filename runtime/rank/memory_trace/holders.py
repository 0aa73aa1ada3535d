"""The object that accumulates tensors: the nearest one above a tensor that also holds those of the steps before.

Used by `tracer.py` for tensors of a suspicious group. A holder is proved from both sides: it is reached from the tensor through its
referrers, and the tensors of the other steps are reached from it.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import CellType
from typing import Any

from grpo_run.runtime.rank.memory_trace.container_bounds import is_bounded, is_set_by_place
from grpo_run.runtime.rank.memory_trace.names import Name, file_of, name_of
from grpo_run.runtime.rank.memory_trace.numbered_attributes import (
    FEWEST,
    name_of_numbered,
    numbered_attributes,
)
from grpo_run.runtime.rank.memory_trace.other_code import bounds_itself, is_chain_cut, is_reset, is_set_anew
from grpo_run.runtime.rank.memory_trace.referrers import (
    Local,
    attributes,
    is_namespace,
    levels,
    reached,
    referrers,
    running_lines,
    running_locals,
)
from grpo_run.runtime.rank.memory_trace.script_files import is_made_anew, user_files
from grpo_run.runtime.rank.memory_trace.sources import Variable
from grpo_run.runtime.rank.memory_trace.tensor_bounds import is_graph_cut
from grpo_run.watchdog.evidence.source import is_outside_frameworks, is_user_file

MOST_HELD = 50_000
"""Objects that are looked at below a possible holder."""
MOST_ITEMS, MOST_OF_ITEM = 64, 1000
"""Items of a possible holder, the last ones, and objects of each of them that are looked at."""
CONTAINERS = (list, tuple, dict, set, frozenset, deque, UserDict, UserList)
HOOKS = "_hooks"
"""End of the names of the dictionaries in which a module has its hooks: code of torch removes them, for a script that asks it to."""
MOST_ENDS = 3
"""Ends of a chain whose name is looked for."""
MOST_LINKED = 20_000
"""Objects of one class among which the first of a chain is looked for."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """An object that holds tensors.

    Attributes:
        identity: the object's id; of objects that are linked to each other, that of their class.
        name: None if the script has none for it.
        kind: its class.
        tensors: what it holds.
        bounded: whether its code removes, replaces or looks up what it holds.
        made_anew: whether its function or class is called in a loop, so that it may be one of an epoch.
        limited: whether it cannot hold more than a number that it was made with.
        ends_graph: whether it is a tensor, whose own autograd graph has saved the others.
        container: the object itself if it is a container; None otherwise. Drop it before the next step.
        is_set_by_place: whether it is a list, and code fills places of it, as in `kept[place] = new`.
        is_attributes: whether it is the attributes of an object whose names differ in a number, by name.
    """

    identity: int
    name: Name | None
    kind: str
    tensors: list[Any]
    bounded: bool
    limited: bool
    ends_graph: bool = False
    container: Any = None
    is_set_by_place: bool = False
    is_attributes: bool = False
    made_anew: bool = False


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
            return _graph_end(one, alone, left_out)
    for level in levels(tensors, left_out):
        for candidate in level:
            found = _attributes_that_hold(candidate, holds_enough, kinds, {*left_out, id(level)})
            if found is not None:
                return found
            if not _can_hold(candidate, {*left_out, id(level)}):
                continue
            held = reached(candidate, kinds, MOST_HELD)
            if holds_enough(held) and _is_in_many_items(candidate, kinds):
                variables = running_locals()
                ours = (*left_out, id(level), id(held))
                linked = not isinstance(candidate, CONTAINERS)
                name = (
                    _name_of_chain(candidate, variables, ours)
                    if linked
                    else name_of(candidate, variables, ours)
                )
                return Holder(
                    identity=id(type(candidate) if linked else candidate),
                    name=name,
                    kind=type(candidate).__name__,
                    tensors=held,
                    bounded=is_chain_cut(_links(candidate), user_files())
                    if linked
                    else _is_bounded(candidate, name),
                    limited=isinstance(candidate, deque) and candidate.maxlen is not None,
                    container=None if linked else candidate,
                    is_set_by_place=isinstance(candidate, (list, UserList))
                    and name is not None
                    and is_set_by_place(name.variable, user_files(), inside=name.inside),
                    made_anew=not linked and _is_made_anew(candidate, name, ours),
                )
            del held  # which would be among the referrers of the next level
    return None


def _is_in_many_items(candidate: Any, kinds: Collection[type]) -> bool:
    """Whether as many items of a container have tensors as it must have got in as many steps.

    A list of two callbacks reaches what both of them keep, and has got none of it. Containers within one of the same class may be a chain.
    """
    if isinstance(candidate, tuple) or not isinstance(candidate, CONTAINERS):
        return True
    data = candidate.data if isinstance(candidate, (UserDict, UserList)) else candidate
    items = list(dict.items(data)) if isinstance(data, dict) else [(one,) for one in data]
    if any(type(part) is type(candidate) for one in items for part in one):
        return True
    return sum(1 for one in items[-MOST_ITEMS:] if reached(one, kinds, MOST_OF_ITEM)) >= FEWEST


def _attributes_that_hold(
    candidate: Any, holds_enough: Callable[[list[Any]], bool], kinds: Collection[type], ignored: set[int]
) -> Holder | None:
    """Return the attributes of an object that hold enough and differ in a number only."""
    for found in numbered_attributes(candidate, ignored):
        held = reached(found.values, kinds, MOST_HELD)
        if holds_enough(held):
            return Holder(
                identity=found.identity,
                name=name_of_numbered(found),
                kind=type(found.owner).__name__,
                tensors=held,
                bounded=False,
                limited=False,
                container=found.values,
                is_attributes=True,
            )
    return None


def _graph_end(tensor: Any, alone: list[Any], ignored: set[int]) -> Holder:
    """Return a tensor as the holder of what its graph has saved."""
    name = name_of(tensor, running_locals(), {*ignored, id(alone)})
    return Holder(
        identity=id(tensor),
        name=name,
        kind=type(tensor).__name__,
        tensors=alone,
        bounded=name is not None and is_graph_cut(name.variable, user_files()),
        limited=False,
        ends_graph=True,
    )


def _name_of_chain(linked: Any, local_variables: dict[int, Local], ignored: Iterable[int]) -> Name | None:
    """Return the name of a chain of objects of one class: that of its first or last one, before that of a link in it."""
    kind = type(linked)
    chain = [one for one in gc.get_objects() if type(one) is kind][:MOST_LINKED]
    links = Counter(id(value) for one in chain for value in attributes(one).values() if type(value) is kind)
    ends = sorted(chain, key=lambda one: links[id(one)])[:MOST_ENDS]
    ours = {*ignored, id(chain), id(ends)}
    names = (name_of(one, local_variables, ours, not_of=kind.__name__) for one in (*ends, linked))
    return next((name for name in names if name is not None), None) or name_of(linked, local_variables, ours)


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
        # what a function has captured is as many objects as it was made with
        return not (
            type(candidate) is tuple and candidate and all(type(one) is CellType for one in candidate)
        )
    return bool(_links(candidate))


def _links(candidate: Any) -> frozenset[str]:
    """Return the attributes through which an object refers to others of its class."""
    return frozenset(name for name, value in attributes(candidate).items() if type(value) is type(candidate))


def _is_made_anew(container: Any, name: Name | None, ours: Iterable[int]) -> bool:
    """Whether a container may be of one epoch: a loop that runs has made it, or nothing refers to it, as to one that is being made."""
    if name is None:
        return not referrers([container], {*ours})
    return is_made_anew(name.variable, user_files(), running_lines())


def _is_bounded(container: Any, name: Name | None) -> bool:
    """Whether the code of a container removes, replaces or looks up what it holds: that of its own class, or of what has it."""
    classes = [kind for kind in type(container).__mro__ if is_outside_frameworks(file_of(kind))]
    return any(bounds_itself(file_of(kind), kind.__name__) for kind in classes) or _is_bounded_by_name(name)


def _is_bounded_by_name(name: Name | None) -> bool:
    if name is None:
        return False
    if name.kind == ContextVar.__name__:
        return is_set_anew(name.variable)  # `get` removes nothing
    if name.variable.name.endswith(HOOKS):
        return False
    if not is_user_file(name.variable.file) and not is_outside_frameworks(name.variable.file):
        return True  # of torch: state of an optimizer that sees a parameter for the first time
    variable = name.variable
    return is_bounded(variable, user_files(), inside=name.inside) or any(
        is_reset(file_of(kind), kind.__name__, variable.name) for kind in _classes_of(variable)
    )


def _classes_of(variable: Variable) -> list[type]:
    """Return the class that has an attribute, and what that inherits from, without the frameworks."""
    for module in list(sys.modules.values()):
        found = getattr(module, "__dict__", {}).get(variable.owner or "")
        if isinstance(found, type) and file_of(found) == variable.file:
            return [kind for kind in found.__mro__ if is_outside_frameworks(file_of(kind))]
    return []
