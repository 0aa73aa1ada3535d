"""The name that the script has for an object: an attribute, a variable of a module, a local variable, or one of a closure.

Used by `holders.py`. An object that has no name of its own is named by what it is in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

from grpo_run.trainers.memory_trace.holding.referrers import (
    Local,
    attributes,
    is_namespace,
    levels,
    referrers,
)
from grpo_run.trainers.memory_trace.holding.sources import Variable, assigned_at
from grpo_run.watchdog.evidence.source import is_user_file

NAMED_WITHIN = 5
"""Levels above an object in which a name is looked for."""


class Name(NamedTuple):
    """A named object.

    Args:
        kind: class of the object.
        variable: its name, and where it is used; the file is empty if it is not known.
        line: where it is assigned; None if the source cannot be read.
        inside: whether only something that holds the object has the name.
    """

    kind: str
    variable: Variable
    line: int | None
    inside: bool = False


def name_of(named: Any, local_variables: dict[int, Local], ignored: Iterable[int]) -> Name | None:
    """Return the best name of an object: one in the script before one in a library, and the nearest of these.

    Args:
        local_variables: of the running functions, by id.
        ignored: ids of objects that are no holders.
    """
    left_out = {*ignored, id(local_variables)}
    best: Name | None = None
    level: list[Any] = [named]
    above = levels(level, left_out)
    for depth in range(NAMED_WITHIN):
        for candidate in level:
            for variable in _variables(candidate, local_variables, {*left_out, id(level)}):
                name = Name(_kind(candidate), variable, assigned_at(variable), depth > 0)
                if is_user_file(variable.file):
                    return name
                best = best or name
        following = next(above, None)
        if following is None:
            break
        level = [one for one in following if not is_namespace(one)]
    return best


def _kind(named: Any) -> str:
    return type(named).__name__


def _variables(named: Any, local_variables: dict[int, Local], ignored: set[int]) -> Iterator[Variable]:
    """Yield the names of an object, those that tell most first."""
    local = local_variables.get(id(named))
    parents = referrers([named], {*ignored})
    for parent in parents:
        if type(parent) is dict and not is_namespace(parent):
            yield from _attribute_through(parent, named, {*ignored, id(parents)})
        elif not isinstance(parent, (dict, list, tuple, set, frozenset, CellType, FunctionType)):
            yield from _attribute(parent, named)
    for parent in parents:
        if is_namespace(parent):
            for name, value in list(parent.items()):
                if value is named:
                    yield Variable(str(parent.get("__file__") or ""), str(name))
        elif isinstance(parent, CellType):
            yield from _closure(parent, {*ignored, id(parents)})
    if local is not None and local.name != "self":
        yield Variable(local.code.co_filename, local.name, function=local.code.co_name)


def _attribute(owner: Any, named: Any) -> Iterator[Variable]:
    if isinstance(owner, ModuleType):
        return
    for name, value in attributes(owner).items():
        if value is named:
            kind = owner if isinstance(owner, type) else type(owner)
            yield Variable(_file_of(kind), name, owner=kind.__name__)


def _attribute_through(dictionary: dict[Any, Any], named: Any, ignored: set[int]) -> Iterator[Variable]:
    """The dictionary may be the attributes of an instance or of a class."""
    names = [name for name, value in list(dictionary.items()) if value is named and isinstance(name, str)]
    if not names:
        return
    for owner in referrers([dictionary], {*ignored}):
        if isinstance(owner, type):
            if owner.__dict__.get(names[0]) is named:
                yield Variable(_file_of(owner), names[0], owner=owner.__name__)
        elif attributes(owner).get(names[0]) is named and type(owner) is not dict:
            yield Variable(_file_of(type(owner)), names[0], owner=type(owner).__name__)


def _closure(cell: CellType, ignored: set[int]) -> Iterator[Variable]:
    for closure in referrers([cell], {*ignored}):
        for function in referrers([closure], {*ignored, id(closure)}) if type(closure) is tuple else []:
            if isinstance(function, FunctionType) and function.__closure__ is closure is not None:
                name = function.__code__.co_freevars[closure.index(cell)]
                scope = function.__qualname__.rpartition(".<locals>")[0].rpartition(".")[2]
                yield Variable(function.__code__.co_filename, name, function=scope or None)


def _file_of(kind: type) -> str:
    module = sys.modules.get(str(kind.__module__))
    return str(getattr(module, "__file__", None) or "")
