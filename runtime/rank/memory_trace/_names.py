"""The name that the script has for an object: an attribute, or a variable of a module, function or closure.

Used by `_holders.py`, `tracer.py` and `_kept_exceptions.py`. Names are found among the objects that refer to
it; no source is read. An object that has no name of its own is named by what it is in.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from grpo_run.runtime.rank.memory_trace._referrers import Local, attributes, is_namespace, levels, referrers
from grpo_run.watchdog.evidence.source import is_user_file

NAMED_WITHIN = 5
"""Levels above an object in which a name is looked for."""


class Variable(NamedTuple):
    """A variable or attribute.

    Args:
        file: where its function, class or module is from; empty if that is not known.
        name: of the variable or attribute.
        owner: the class or object whose attribute it is; None for a variable.
        function: in which it is local; None for one of a module, and for an attribute.
        line: where the function or the `__init__` of the class begins; None if there is none.
    """

    file: str
    name: str
    owner: str | None = None
    function: str | None = None
    line: int | None = None


class Name(NamedTuple):
    """A named object.

    Args:
        kind: class of the object.
        variable: its name.
        inside: whether only something that holds the object has the name.
    """

    kind: str
    variable: Variable
    inside: bool = False


def name_of(named: Any, local_variables: dict[int, Local], ignored: Iterable[int]) -> Name | None:
    """Return the nearest name of an object, and of several one in the script before one in a library.

    Args:
        local_variables: of the running functions, by id.
        ignored: ids of objects that are no holders.
    """
    left_out = {*ignored, id(local_variables)}
    level: list[Any] = [named]
    above = levels(level, left_out)
    for depth in range(NAMED_WITHIN):
        best: Name | None = None
        for candidate in level:
            for variable in _variables(candidate, local_variables, {*left_out, id(level)}):
                name = Name(type(candidate).__name__, variable, depth > 0)
                if is_user_file(variable.file):
                    return name
                best = best or name
        if best is not None:
            return best
        level = [one for one in next(above, ()) if not is_namespace(one)]
        if not level:
            break
    return None


def _variables(named: Any, local_variables: dict[int, Local], ignored: set[int]) -> Iterator[Variable]:
    """Yield the names of an object, those that tell most first."""
    local = local_variables.get(id(named))
    parents = referrers([named], {*ignored})
    for parent in parents:
        if type(parent) is dict and not is_namespace(parent):
            yield from _attribute_through(parent, named, {*ignored, id(parents)})
        elif not isinstance(parent, (dict, list, tuple, set, frozenset, CellType, FunctionType, ModuleType)):
            for name, value in attributes(parent).items():
                if value is named:
                    yield _attribute_of(parent if isinstance(parent, type) else type(parent), name)
    for parent in parents:
        if is_namespace(parent):
            names = [str(name) for name, value in list(parent.items()) if value is named]
            yield from (Variable(str(parent.get("__file__") or ""), name) for name in names)
        elif isinstance(parent, CellType):
            yield from _closure(parent, {*ignored, id(parents)})
    if local is not None and local.name != "self":
        yield _local(*local)


def _local(name: str, code: CodeType) -> Variable:
    return Variable(code.co_filename, name, function=code.co_name, line=code.co_firstlineno)


def _attribute_of(kind: type, name: str) -> Variable:
    file = file_of(kind)
    return Variable(file, name, owner=kind.__name__, line=first_line(kind, file))


def _attribute_through(dictionary: dict[Any, Any], named: Any, ignored: set[int]) -> Iterator[Variable]:
    """The dictionary may be the attributes of an instance, a class or a function."""
    names = [name for name, value in list(dictionary.items()) if value is named and isinstance(name, str)]
    if not names:
        return
    for owner in referrers([dictionary], {*ignored}):
        if isinstance(owner, type):
            if owner.__dict__.get(names[0]) is named:
                yield _attribute_of(owner, names[0])
        elif attributes(owner).get(names[0]) is not named or isinstance(owner, (dict, ModuleType)):
            continue
        elif isinstance(owner, FunctionType):
            name = f"{owner.__qualname__}()"
            yield _local(names[0], owner.__code__)._replace(function=None, owner=name)
        else:
            yield _attribute_of(type(owner), names[0])


def _closure(cell: CellType, ignored: set[int]) -> Iterator[Variable]:
    for closure in referrers([cell], {*ignored}):
        for function in referrers([closure], {*ignored, id(closure)}) if type(closure) is tuple else []:
            if isinstance(function, FunctionType) and function.__closure__ is closure is not None:
                name = function.__code__.co_freevars[closure.index(cell)]
                scope = function.__qualname__.rpartition(".<locals>")[0].rpartition(".")[2]
                yield _local(name, function.__code__)._replace(function=scope or None)


def file_of(kind: type) -> str:
    """Return the file of the module that has a class; an empty text if it has none."""
    module = sys.modules.get(str(kind.__module__))
    return str(getattr(module, "__file__", None) or "")


def first_line(kind: type, file: str) -> int | None:
    """Return where the `__init__` of a class begins; None if its file has none, as for a dataclass."""
    code = getattr(kind.__dict__.get("__init__"), "__code__", None)
    return code.co_firstlineno if code is not None and code.co_filename == file else None
