"""Attributes that are told apart by a number in their names, as `setattr(model, f"cache_{step}", tensor)` makes one in each step.

Used by `holders.py`. An instance with many attributes reaches tensors of many steps without keeping too many, so only such names count
as a container. Also variables of a module, and buffers and parameters of a model.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from types import ModuleType
from typing import Any, NamedTuple

from grpo_run.runtime.rank.memory_trace.names import Name, file_of
from grpo_run.runtime.rank.memory_trace.referrers import attributes, is_namespace, referrers
from grpo_run.runtime.rank.memory_trace.script_files import text_of, user_files
from grpo_run.runtime.rank.memory_trace.sources import Variable, last_name, parsed

FEWEST = 5
"""Attributes that differ in their number."""
SETTING = frozenset(
    {"setattr", "__setattr__", "register_buffer", "register_parameter", "add_module", "register_module"}
)
"""Functions that set an attribute whose name is computed."""
NUMBER = re.compile(r"\d+")
OF_MODELS = ("_buffers", "_parameters")
"""Dictionaries in which a model has its attributes."""


class Numbered(NamedTuple):
    """Attributes of one object.

    Args:
        owner: the object.
        pattern: their name with `*` for the number.
        values: by name.
    """

    owner: Any
    pattern: str
    values: dict[str, Any]

    @property
    def identity(self) -> int:
        """Equal for the same attributes later."""
        return hash((id(self.owner), self.pattern))


def numbered_attributes(candidate: Any, ignored: set[int]) -> list[Numbered]:
    """Return attributes with numbers that an object has, or a dictionary has of one.

    Holds what they are until the caller drops it.

    Args:
        ignored: ids of objects that own nothing.
    """
    found = _families(candidate if type(candidate) is dict else attributes(candidate))
    if not found:
        return []
    owner = candidate if type(candidate) is not dict else _owner(candidate, ignored)
    return [] if owner is None else [Numbered(owner, pattern, values) for pattern, values in found.items()]


def _families(values: Mapping[Any, Any]) -> dict[str, dict[str, Any]]:
    families: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in list(values.items()):
        if type(name) is str and name.isidentifier() and (pattern := NUMBER.sub("*", name)) != name:
            families[pattern][name] = value
    return {pattern: values for pattern, values in families.items() if len(values) >= FEWEST}


def _owner(dictionary: dict[Any, Any], ignored: set[int]) -> Any:
    """Return the object whose attributes are in a dictionary; None if it is one by itself."""
    if is_namespace(dictionary):
        return dictionary
    parents = referrers([dictionary], {*ignored})
    for parent in parents:
        if isinstance(parent, type):
            if any(parent.__dict__.get(name) is value for name, value in list(dictionary.items())[-1:]):
                return parent
        elif getattr(parent, "__dict__", None) is dictionary:
            return parent
        elif type(parent) is dict:
            if any(parent.get(name) is dictionary for name in OF_MODELS):
                return _owner(parent, {*ignored, id(parents)})
        elif any(attributes(parent).get(name) is dictionary for name in OF_MODELS):
            return parent
    return None


def name_of_numbered(found: Numbered) -> Name:
    """Return attributes as `cache_*` of their class, with the line of the script that sets them."""
    owner = found.owner
    if type(owner) is dict:  # of a module
        file, text = str(owner.get("__file__") or ""), None
    elif isinstance(owner, ModuleType):
        file, text = str(getattr(owner, "__file__", None) or ""), owner.__name__
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        file, text = file_of(kind), kind.__name__
    kind_of_name = "variables" if text is None else "attributes"
    for script in dict.fromkeys((file, *user_files())):
        line = _set_at(script, found.pattern)
        if line is not None:
            return Name(kind_of_name, Variable(script, found.pattern, owner=text), line)
    return Name(kind_of_name, Variable(file, found.pattern, owner=text), None)


def _set_at(file: str, pattern: str) -> int | None:
    """Return the line at which a source sets attributes by computed names that begin or end as these do; None without one."""
    parts = [part for part in pattern.split("*") if part.strip("_")] or [pattern.partition("*")[0]]
    if parts[0] not in text_of(file):
        return None
    tree = parsed(file)
    if tree is None:
        return None
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.expr)
        for name in _computed_names(node)
        if any(
            isinstance(one, ast.Constant) and isinstance(one.value, str) and parts[0] in one.value
            for one in ast.walk(name)
        )
    ]
    return min(lines, default=None)


def _computed_names(node: ast.expr) -> list[ast.expr]:
    """Return what a call sets by name, or an assignment to an item of `vars(one)`, `one.__dict__` or `globals()`."""
    if isinstance(node, ast.Call) and last_name(node.func) in SETTING:
        return node.args[:2]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        container = node.value.func if isinstance(node.value, ast.Call) else node.value
        return [node.slice] if last_name(container) in ("vars", "globals", "__dict__") else []
    return []
