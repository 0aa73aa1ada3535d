"""The name that the script has for an object: an attribute, a variable of a module, a local variable, or one of a closure.

Used by `holders.py`. An object that has no name of its own is named by what it is in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar, copy_context
from types import CellType, FunctionType, ModuleType
from typing import Any, NamedTuple

from grpo_run.runtime.rank.memory_trace.referrers import (
    Local,
    attributes,
    is_namespace,
    levels,
    referrers,
    suspended_locals,
)
from grpo_run.runtime.rank.memory_trace.script_files import where_set
from grpo_run.runtime.rank.memory_trace.sources import Variable, assigned_at, is_assigned
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


def name_of(
    named: Any, local_variables: dict[int, Local], ignored: Iterable[int], *, not_of: str | None = None
) -> Name | None:
    """Return the best name of an object: one in the script before one in a library, and the nearest of these.

    Args:
        local_variables: of the running functions, by id.
        ignored: ids of objects that are no holders.
        not_of: a class whose attributes are no names.
    """
    left_out = {*ignored, id(local_variables)}
    best: Name | None = None
    level: list[Any] = [named]
    above = levels(level, left_out)
    for depth in range(NAMED_WITHIN):
        for candidate in level:
            for variable in _variables(candidate, local_variables, {*left_out, id(level)}):
                if not_of is not None and variable.owner == not_of:
                    continue
                name = Name(_kind(candidate), variable, assigned_at(variable), depth > 0)
                if is_user_file(variable.file):
                    return name
                best = best or name
        holding = _context_variables(level)
        level = [*holding, *(one for one in next(above, ()) if not is_namespace(one))]
        if not level:
            break
    return best


def _context_variables(values: list[Any]) -> list[ContextVar[Any]]:
    """Return the context variables of this thread whose value is one of some objects."""
    wanted = set(map(id, values))
    return [variable for variable, value in copy_context().items() if id(value) in wanted]


def _kind(named: Any) -> str:
    return type(named).__name__


def _variables(named: Any, local_variables: dict[int, Local], ignored: set[int]) -> Iterator[Variable]:
    """Yield the names of an object, those that tell most first."""
    local = local_variables.get(id(named))
    parents = referrers([named], {*ignored})
    for parent in parents:
        for name, code in suspended_locals(parent, named):
            yield Variable(code.co_filename, name, function=code.co_name)
        if type(parent) is dict and not is_namespace(parent):
            yield from _attribute_through(parent, named, {*ignored, id(parents)})
        elif not isinstance(parent, (dict, list, tuple, set, frozenset, CellType, FunctionType)):
            yield from _attribute(parent, named)
    for parent in parents:
        if is_namespace(parent):
            for name, value in list(parent.items()):
                if value is named:
                    yield _variable_of_module(parent, str(name))
        elif isinstance(parent, CellType):
            yield from _closure(parent, {*ignored, id(parents)})
    if local is not None and local.name != "self":
        yield Variable(local.code.co_filename, local.name, function=local.code.co_name)


def _attribute(owner: Any, named: Any) -> Iterator[Variable]:
    if isinstance(owner, ModuleType):
        return
    for name, value in attributes(owner).items():
        if value is named:
            yield _attribute_of(owner if isinstance(owner, type) else type(owner), name)


def _attribute_of(kind: type, name: str) -> Variable:
    """Return an attribute of a class, in the file of the class; in the script's, if that sets it on a library's object."""
    variable = Variable(file_of(kind), name, owner=kind.__name__)
    return variable if is_user_file(variable.file) else where_set(variable, *map(file_of, kind.__mro__))


def _attribute_through(dictionary: dict[Any, Any], named: Any, ignored: set[int]) -> Iterator[Variable]:
    """The dictionary may be the attributes of an instance or of a class."""
    names = [name for name, value in list(dictionary.items()) if value is named and isinstance(name, str)]
    if not names:
        return
    for owner in referrers([dictionary], {*ignored}):
        if isinstance(owner, type):
            if owner.__dict__.get(names[0]) is named:
                yield _attribute_of(owner, names[0])
        elif isinstance(owner, FunctionType):
            if owner.__kwdefaults__ is dictionary:
                continue  # the function itself has a name
            yield where_set(Variable(owner.__code__.co_filename, names[0], owner=f"{owner.__qualname__}()"))
        elif isinstance(owner, ModuleType):  # made by the script
            yield where_set(Variable("", names[0], owner=owner.__name__))
        elif attributes(owner).get(names[0]) is named and type(owner) is not dict:
            yield _attribute_of(type(owner), names[0])


def _variable_of_module(namespace: dict[str, Any], name: str) -> Variable:
    """Return a variable of a module; if another file of the script has set it, as an attribute of the module."""
    own = Variable(str(namespace.get("__file__") or ""), name)
    if is_assigned(own):
        return own
    outside = where_set(Variable("", name, owner=str(namespace["__name__"])))
    return outside if outside.file else own


def _closure(cell: CellType, ignored: set[int]) -> Iterator[Variable]:
    for closure in referrers([cell], {*ignored}):
        for function in referrers([closure], {*ignored, id(closure)}) if type(closure) is tuple else []:
            if isinstance(function, FunctionType) and function.__closure__ is closure is not None:
                name = function.__code__.co_freevars[closure.index(cell)]
                scope = function.__qualname__.rpartition(".<locals>")[0].rpartition(".")[2]
                yield Variable(function.__code__.co_filename, name, function=scope or None)


def file_of(kind: type) -> str:
    """Return the file of the module that has a class; an empty text if it has none."""
    module = sys.modules.get(str(kind.__module__))
    return str(getattr(module, "__file__", None) or "")
