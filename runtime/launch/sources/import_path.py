"""Directories that a source adds to `sys.path`, found by syntax.

Called by `fresh_interpreters.py` before ranks start, to save a start that the rank itself would have to repeat: it compares
the path as it really is when the script imports its libraries. Understands what scripts usually write: literals, `__file__`,
`os.path`, `os.getcwd()` and `pathlib`. Anything else is not found.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from grpo_run.runtime.launch.sources.syntax import last_name

PATH_FUNCTIONS: Mapping[str, Callable[..., object]] = {
    "abspath": os.path.abspath,
    "dirname": os.path.dirname,
    "expanduser": os.path.expanduser,
    "join": os.path.join,
    "normpath": os.path.normpath,
    "realpath": os.path.realpath,
    "getcwd": os.getcwd,
    "cwd": Path.cwd,
    "str": str,
    "fspath": os.fspath,
    "Path": Path,
    "PurePath": Path,
}
"""Functions that are called by these names, whatever module they are taken from."""
PATH_METHODS: Mapping[str, Callable[..., object]] = {
    "resolve": Path.resolve,
    "absolute": Path.absolute,
    "joinpath": Path.joinpath,
    "as_posix": Path.as_posix,
    "expanduser": Path.expanduser,
}


class _Unknown(Exception):
    """An expression that is not understood."""


def directories_added(nodes: Sequence[ast.AST], file: Path) -> list[str]:
    """Return the directories that a source adds before others on `sys.path`, in the order of the source.

    Args:
        nodes: the source's syntax tree.
        file: the source's path, which `__file__` stands for.
    """
    names = {"__file__": ast.Constant(str(file))}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            names.setdefault(node.targets[0].id, node.value)  # type: ignore[arg-type]
    found = []
    for node in nodes:
        for expression in _added(node):
            try:
                value = _value(expression, names, 0)
            except (_Unknown, TypeError, ValueError, OSError, IndexError):
                continue
            if isinstance(value, str | Path) and "\0" not in str(value):
                found.append(str(value))
    return found


def _added(node: ast.AST) -> Sequence[ast.expr]:
    """The expressions that a statement or call adds in front of `sys.path`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr == "insert" and _is_path(node.func.value) and len(node.args) == 2:
            return [node.args[1]]
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            sliced = isinstance(target, ast.Subscript) and _is_path(target.value)
            if sliced or _is_path(target):
                return _elements(node.value)
    return []


def _elements(value: ast.expr) -> Sequence[ast.expr]:
    """The elements of `[...]`, also in `[...] + sys.path` and `[..., *sys.path]`."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        return _elements(value.left)
    if isinstance(value, ast.List | ast.Tuple):
        return [element for element in value.elts if not isinstance(element, ast.Starred)]
    return []


def _is_path(node: ast.expr) -> bool:
    """Whether a node is `sys.path`."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )


def _value(node: ast.expr, names: Mapping[str, ast.expr], depth: int) -> object:
    """Evaluate an expression of paths.

    Raises:
        _Unknown: it is not one.
    """
    if depth > 20:
        raise _Unknown
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return _value(names[node.id], names, depth + 1)
    if isinstance(node, ast.Attribute):
        if node.attr in ("pardir", "curdir"):
            return getattr(os, node.attr)
        return getattr(_path(node.value, names, depth), _property(node.attr))
    if isinstance(node, ast.Subscript):
        return _value(node.value, names, depth + 1)[_value(node.slice, names, depth + 1)]  # type: ignore[index]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return _path(node.left, names, depth) / str(_value(node.right, names, depth + 1))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return str(_value(node.left, names, depth + 1)) + str(_value(node.right, names, depth + 1))
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(_value(part.value if isinstance(part, ast.FormattedValue) else part, names, depth + 1))
            for part in node.values
        )
    if isinstance(node, ast.Call) and not node.keywords:
        return _called(node, names, depth)
    raise _Unknown


def _called(node: ast.Call, names: Mapping[str, ast.expr], depth: int) -> object:
    function = node.func
    arguments = [_value(argument, names, depth + 1) for argument in node.args]
    name = last_name(function)
    if isinstance(function, ast.Attribute) and name in PATH_METHODS:
        try:
            return PATH_METHODS[name](_path(function.value, names, depth), *arguments)
        except _Unknown:
            pass  # a function of a module, such as os.path.expanduser
    if name in PATH_FUNCTIONS:
        return PATH_FUNCTIONS[name](*arguments)
    raise _Unknown


def _path(node: ast.expr, names: Mapping[str, ast.expr], depth: int) -> Path:
    value = _value(node, names, depth + 1)
    if not isinstance(value, Path):
        raise _Unknown
    return value


def _property(name: str) -> str:
    if name not in ("parent", "parents", "anchor", "name"):
        raise _Unknown
    return name
