"""The object that accumulates tensors: the nearest above a tensor that also holds those of other steps.

Used by `_tracer.py`. A holder is proved from both sides: it is reached from the tensor through its referrers,
and the tensors of the other steps are reached from it. It is named by an attribute or variable, which is
found among the objects that refer to it; no source is read. `_finding.py` decides whether it grows.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

from grpo_run.runtime.features.memory_trace._referrers import (
    attributes,
    is_namespace,
    levels,
    reached,
    referrers,
    running_locals,
)
from grpo_run.runtime.features.memory_trace.events import Site
from grpo_run.watchdog.evidence.source import is_user_file

MOST_HELD = 50_000
"""Objects that are looked at below a possible holder."""
MOST_ITEMS, MOST_OF_ITEM = 64, 1000
"""Items of a possible holder, the last ones, and objects of each of them that are looked at."""
FEWEST_ITEMS = 3
"""Items with tensors that a container must have."""
CONTAINERS = (list, dict, set, deque)
NAMED_WITHIN = 5
"""Levels above an object in which a name is looked for."""


class Name(NamedTuple):
    """A variable or attribute of the script that is an object, or holds it.

    Args:
        kind: class of the object.
        name: of the variable or attribute.
        of: the class, or the function in which it is local, as ` of Collector` or ` in main()`; empty for a
            variable of a module.
        site: where the function or the `__init__` of the class begins; None for an unknown file.
        inside: whether only something that holds the object has the name.
    """

    kind: str
    name: str
    of: str
    site: Site | None
    inside: bool = False

    def __str__(self) -> str:
        return f"{self.kind} `{self.name}`{self.of}"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """An object that holds tensors.

    Attributes:
        identity: the object's id.
        name: None if the script has none for it.
        kind: its class.
        tensors: what it holds; a tensor holds what its own autograd graph has saved.
        limited: whether it cannot hold more than a number that it was made with.
    """

    identity: int
    name: Name | None
    kind: str
    tensors: list[Any]
    limited: bool = False

    @property
    def same(self) -> object:
        """Equal for what a script puts into a new container of the same name."""
        return self.identity if self.name is None or self.name.inside else self.name

    def __str__(self) -> str:
        if self.name is None:
            return f"{self.kind} without a name"
        article = "an" if self.kind[0] in "AEIOaeio" else "a"
        return f"{article} {self.kind} in {self.name}" if self.name.inside else str(self.name)


def find_holder(
    tensors: Collection[Any],
    holds_enough: Callable[[list[Any]], bool],
    kinds: Collection[type],
    ignored: Iterable[int],
) -> Holder | None:
    """Return the nearest object above some tensors that holds enough others; of several, one with a name.

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
            return _holder(one, alone, left_out)
    for level in levels(tensors, left_out):
        nameless = None
        for candidate in level:
            if _can_hold(candidate, {*left_out, id(level)}):
                held = reached(candidate, kinds, MOST_HELD)
                if holds_enough(held) and _is_in_many_items(candidate, kinds):
                    found = _holder(candidate, held, {*left_out, id(level)})
                    if found.name is not None:
                        return found
                    # a copy that the script is about to give a name, for instance
                    nameless = nameless or found
                del held  # which would be among the referrers of the next level
        if nameless is not None:
            return nameless
    return None


def _holder(one: Any, held: list[Any], ignored: set[int]) -> Holder:
    limited = isinstance(one, deque) and one.maxlen is not None
    name = name_of(one, {*ignored, id(held)})
    return Holder(identity=id(one), name=name, kind=kind_of(one), tensors=held, limited=limited)


def _is_in_many_items(candidate: Any, kinds: Collection[type]) -> bool:
    """Whether several items of a container have tensors.

    A list of two callbacks reaches what both of them keep, and has got none of it.
    """
    items = list(dict.items(candidate)) if isinstance(candidate, dict) else [(one,) for one in candidate]
    return sum(1 for one in items[-MOST_ITEMS:] if reached(one, kinds, MOST_OF_ITEM)) >= FEWEST_ITEMS


def _can_hold(candidate: Any, ignored: set[int]) -> bool:
    """Whether an object may accumulate others.

    An instance such as a trainer reaches tensors of many steps without holding too many of any kind.
    """
    if type(candidate) is dict:
        owners = [] if is_namespace(candidate) else referrers([candidate], {*ignored})
        return not is_namespace(candidate) and all(attributes(one) is not candidate for one in owners)
    return isinstance(candidate, CONTAINERS)


def name_of(named: Any, ignored: Iterable[int]) -> Name | None:
    """Return the nearest name of an object, and of several one in the script before one in a library.

    Args:
        ignored: ids of objects that are no holders.
    """
    local_variables = running_locals()
    left_out = {*ignored, id(local_variables)}
    level: list[Any] = [named]
    above = levels(level, left_out)
    for depth in range(NAMED_WITHIN):
        found = []
        for candidate in level:
            kind, inside = kind_of(candidate), depth > 0
            places = _places(candidate, {*left_out, id(level)})
            found += [Name(kind, name, *_described(owner), inside) for owner, name in places]
            if id(candidate) in local_variables:
                name, code = local_variables[id(candidate)]
                site = Site(code.co_filename, code.co_firstlineno, code.co_name)
                found.append(Name(kind, name, f" in {code.co_name}()", site, inside))
        if found:
            return next((one for one in found if one.site and is_user_file(one.site.file)), found[0])
        level = [one for one in next(above, ()) if not is_namespace(one)]
    return None


def _places(named: Any, ignored: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield the classes and functions that an object is an attribute of, and dictionaries of modules."""
    parents = referrers([named], {*ignored})
    for parent in parents:
        # the dictionary of attributes is an object of its own, or part of the instance
        owners = [parent]
        if type(parent) is dict and not is_namespace(parent):
            owners = referrers([parent], {*ignored, id(parents)})
        for owner in owners:
            for name, value in list((owner if is_namespace(owner) else attributes(owner)).items()):
                if value is named:
                    yield owner, str(name)


def _described(owner: Any) -> tuple[str, Site | None]:
    """Return a class, function or module in words, and where it begins."""
    if is_namespace(owner):
        file = owner.get("__file__")
        return "", Site(str(file), None) if file else None
    kind = owner if isinstance(owner, (type, FunctionType)) else type(owner)
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    code = getattr(kind.__dict__.get("__init__"), "__code__", None)
    # that of a dataclass is in no file
    line = code.co_firstlineno if code is not None and code.co_filename == file else None
    return f" of {kind.__name__}", Site(file, line) if file else None


def kind_of(one: Any) -> str:
    """Return the class of an object, in words."""
    kind = type(one).__name__
    return "tensor" if kind == "Tensor" else kind
