"""The files of the script, and the line at which one of them sets an attribute of something that is not its own.

Used by `names.py` and `holders.py`: scripts set attributes of models, functions and modules.
"""

from __future__ import annotations

import ast
import functools
import sys

from grpo_run.trainers.memory_trace.holding.sources import Variable, parsed
from grpo_run.watchdog.evidence.source import is_user_file

MOST_FILES = 64
"""Files of the script that are read."""


def user_files() -> tuple[str, ...]:
    """Return the files of the script that are imported."""
    return _user_files(len(sys.modules))


@functools.lru_cache(maxsize=1)
def _user_files(modules: int) -> tuple[str, ...]:
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    return tuple(dict.fromkeys(file for file in files if file and is_user_file(file)))[:MOST_FILES]


def where_set(variable: Variable, *own: str) -> Variable:
    """Return the variable with the file of the script that sets it from outside; as it is if none does.

    Args:
        variable: an attribute.
        own: sources of its owner. It stays as it is if one of them sets it.
    """
    if any(sets_attribute(file, variable.name) for file in own if file):
        return variable
    for file in user_files():
        if sets_attribute(file, variable.name, from_outside=True):
            return variable._replace(file=file)
    return variable


@functools.lru_cache(maxsize=1024)
def sets_attribute(file: str, name: str, *, from_outside: bool = False) -> bool:
    """Whether a source assigns an attribute, as in `model.kept = []`; from outside, of another object than `self`."""
    tree = parsed(file)
    if tree is None:
        return False
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.ctx, ast.Store)
        and not (from_outside and isinstance(node.value, ast.Name) and node.value.id == "self")
        for node in ast.walk(tree)
    )
