"""The files of the script, and the line at which one of them sets an attribute of something that is not its own.

Used by the other modules of this package: scripts set attributes of models, functions and modules, and bound what they hold in
other files. Text is searched before it is parsed, which takes 300 times as long. Methods and packages of the same name are no attribute:
`self.all` has nothing to do with each `mask.all()`, nor `self.data` with `from torch.utils.data import Dataset`.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Collection, Iterable

from grpo_run.runtime.rank.memory_trace.sources import (
    MOST_BYTES,
    NAMED_FUNCTIONS,
    Variable,
    last_name,
    parsed,
)
from grpo_run.watchdog.evidence.source import is_user_file

MOST_PARSED = 192
"""Files that are parsed for one name, 3 to 10 ms each. All of them fit in the cache of `parsed`, which is used several times."""

MOST_CALLERS = 16
"""Functions whose callers are looked for."""
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

_is_of_script = functools.lru_cache(maxsize=16384)(is_user_file)


def user_files() -> tuple[str, ...]:
    """Return the files of the script that are imported."""
    files = (getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values()))
    return tuple(dict.fromkeys(file for file in files if isinstance(file, str) and _is_of_script(file)))


def sources_with(
    files: Iterable[str], *, attributes: Collection[str] = (), functions: Collection[str] = ()
) -> list[ast.Module] | None:
    """Return the syntax of the files that mention one of some attributes or define one of some functions.

    None if there are more of them than are parsed: what they say is not known.
    """
    matching = [file for file in files if _mentions(file, frozenset(attributes), frozenset(functions))]
    if len(matching) > MOST_PARSED:
        return None
    return [tree for tree in map(parsed, matching) if tree is not None]


def other_sources_with(variable: Variable, files: Iterable[str]) -> list[ast.Module] | None:
    """Return the syntax of files that may use an attribute, without that of its class; None if there are too many."""
    return sources_with((file for file in files if file != variable.file), attributes=[variable.name])


def is_made_anew(variable: Variable, files: Iterable[str], running: Collection[tuple[str, int]]) -> bool:
    """Whether a loop that runs calls the function or class that has a variable: each round has one of its own, as each epoch.

    Args:
        variable: a local variable, or an attribute.
        files: of the script.
        running: file and line of each function that runs.
    """
    waiting = [name for name in (variable.function, variable.owner) if name is not None][:1]
    sources = tuple(dict.fromkeys((variable.file, *files)))
    lines = {file: {line for of, line in running if of == file} for file in sources}
    seen: set[str] = set()
    while waiting and len(seen) < MOST_CALLERS:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        matching = [file for file in sources if _calls(file, name)]
        if len(matching) > MOST_PARSED:
            return True
        for file in matching:
            for loop, function in _calls_in(parsed(file), name):
                if any(line in lines[file] for line in loop):
                    return True
                if function is not None:
                    waiting.append(function)
    return False


def _calls_in(tree: ast.Module | None, name: str) -> list[tuple[range, str | None]]:
    """Return the lines of the outermost loop around each call, and the function that has it; the class for its `__init__`."""
    found: list[tuple[range, str | None]] = []

    def visit(node: ast.AST, function: str | None, owner: str | None, loop: range) -> None:
        if isinstance(node, ast.Call) and last_name(node.func) == name:
            found.append((loop, owner if function == "__init__" else function))
        if isinstance(node, ast.ClassDef):
            function, owner, loop = None, node.name, range(0)
        elif isinstance(node, NAMED_FUNCTIONS):
            function, loop = node.name, range(0)
        elif isinstance(node, LOOPS) and not loop:
            loop = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for child in ast.iter_child_nodes(node):
            visit(child, function, owner, loop)

    if tree is not None:
        visit(tree, None, None, range(0))
    return found


@functools.lru_cache(maxsize=16384)
def _calls(file: str, name: str) -> bool:
    return re.search(rf"\b{re.escape(name)}[ \t]*\(", text_of(file)) is not None


def where_set(variable: Variable, *own: str) -> Variable:
    """Return the variable with the file of the script that sets it from outside; as it is if none does.

    Args:
        variable: an attribute.
        own: sources of its owner. It stays as it is if one of them sets it.
    """
    if any(sets_attribute(file, variable.name) for file in own if file):
        return variable
    mentioned = [file for file in user_files() if _mentions(file, frozenset([variable.name]), frozenset())]
    for file in mentioned[:MOST_PARSED]:
        if sets_attribute(file, variable.name, from_outside=True):
            return variable._replace(file=file)
    return variable


@functools.lru_cache(maxsize=1024)
def sets_attribute(file: str, name: str, *, from_outside: bool = False) -> bool:
    """Whether a source assigns an attribute, as in `model.kept = []`; from outside, of another object than `self`."""
    tree = parsed(file) if _mentions(file, frozenset([name]), frozenset()) else None
    if tree is None:
        return False
    return any(
        isinstance(node, ast.Attribute)
        and node.attr == name
        and isinstance(node.ctx, ast.Store)
        and not (from_outside and isinstance(node.value, ast.Name) and node.value.id == "self")
        for node in ast.walk(tree)
    )


@functools.lru_cache(maxsize=16384)
def _mentions(file: str, attributes: frozenset[str], functions: frozenset[str]) -> bool:
    """Whether the text of a source has one of some attributes, or the definition of one of some functions.

    What is called on the same line is a method, and what is imported from is a package.
    """
    other = r"(?![ \t]*\(|[ \t]+import\b)"
    wanted = [rf"\.[\s\\]*{re.escape(name)}\b{other}" for name in attributes]
    wanted += [rf"\bdef[\s\\]+{re.escape(name)}\b" for name in functions]
    return bool(wanted) and re.search("|".join(wanted), text_of(file)) is not None


@functools.lru_cache(maxsize=1024)
def text_of(file: str) -> str:
    """Return a source as it is written; nothing if it cannot be read."""
    try:
        with open(file, encoding="utf-8", errors="replace") as source:
            return source.read(MOST_BYTES)
    except (OSError, ValueError):
        return ""
