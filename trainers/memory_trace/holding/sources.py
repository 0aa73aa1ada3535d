"""What the script's sources say of a variable or attribute: where it is assigned, and whether its code bounds what it holds.

Used by `names.py` and `holders.py`. Reads sources as syntax; executes nothing.
"""

from __future__ import annotations

import ast
import functools
import tokenize
from collections.abc import Iterable, Iterator
from typing import NamedTuple

MOST_BYTES = 2 * 1024 * 1024
"""Longest source that is read."""
REMOVING = frozenset({"pop", "popleft", "popitem", "clear", "remove", "discard", "get", "setdefault"})
"""Methods that remove something, or look it up as a cache does."""
HEAPS = frozenset({"heappop", "heapreplace", "heappushpop"})


class Variable(NamedTuple):
    """A name in a source.

    Args:
        file: absolute path.
        name: of the variable or attribute.
        owner: the class whose attribute it is; None for a variable.
        function: in which it is local; None for one of the module, and for an attribute.
    """

    file: str
    name: str
    owner: str | None = None
    function: str | None = None


@functools.lru_cache(maxsize=256)
def _parsed(file: str) -> ast.Module | None:
    try:
        with tokenize.open(file) as source:
            return ast.parse(source.read(MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def assigned_at(variable: Variable) -> int | None:
    """Return the line of the first assignment, or else of the class or function; None if the source cannot be read."""
    tree = _parsed(variable.file)
    if tree is None:
        return None
    scope = _scope(tree, variable)
    lines = [node.lineno for node, target, _ in _assignments(scope, variable) if _is(target, variable)]
    if not lines and isinstance(scope, ast.ClassDef):
        own = variable._replace(owner=None)
        lines = [node.lineno for node, target, _ in _assignments(scope, own) if _is(target, own)]
    return min(lines) if lines else getattr(scope, "lineno", None)


def is_bounded(variable: Variable, also: Iterable[str] = ()) -> bool:
    """Whether code removes, replaces or looks up what the variable holds, so that it may stop growing.

    Args:
        also: other files, where an attribute may be used through another name than `self`.
    """
    tree = _parsed(variable.file)
    if tree is None:
        return False
    assigned = 0
    for scope in _scopes(tree, variable):
        for _, target, in_loop in _assignments(scope, variable):
            if _is(target, variable):
                assigned += 1
                if in_loop:
                    return True
        if any(_bounds(node, variable) for node in _nodes(scope, variable)):
            return True
    if assigned > 1:
        return True
    others = (_parsed(file) for file in also if variable.owner is not None and file != variable.file)
    return any(_bounds(node, variable) for other in others if other is not None for node in ast.walk(other))


def _scopes(tree: ast.Module, variable: Variable) -> Iterator[ast.AST]:
    """The class, function or module that has the variable, and the classes of the file that inherit an attribute."""
    scope = _scope(tree, variable)
    yield scope
    if variable.owner is not None and scope is not tree:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and variable.owner in {_last_name(base) for base in node.bases}:
                yield node


def _scope(tree: ast.Module, variable: Variable) -> ast.AST:
    wanted = variable.owner or variable.function
    kinds = (ast.ClassDef,) if variable.owner else (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if wanted is not None and isinstance(node, kinds) and node.name == wanted:
            return node
    return tree


def _nodes(scope: ast.AST, variable: Variable) -> Iterator[ast.AST]:
    """Everything in a scope, without functions that have a variable of their own by the same name."""
    waiting: list[ast.AST] = [scope]
    while waiting:
        node = waiting.pop()
        yield node
        waiting.extend(
            child for child in ast.iter_child_nodes(node) if child is scope or not _shadows(child, variable)
        )


def _shadows(node: ast.AST, variable: Variable) -> bool:
    if variable.owner is not None or not isinstance(node, _FUNCTIONS):
        return False
    arguments = node.args
    parameters = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    if any(one.arg == variable.name for one in parameters):
        return True
    if isinstance(node, ast.Lambda):
        return False
    inside = list(ast.walk(node))
    if any(isinstance(one, (ast.Global, ast.Nonlocal)) and variable.name in one.names for one in inside):
        return False
    return any(
        isinstance(one, ast.Name) and one.id == variable.name and isinstance(one.ctx, ast.Store)
        for one in inside
    )


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _assignments(scope: ast.AST, variable: Variable) -> Iterator[tuple[ast.stmt, ast.expr, bool]]:
    """Yield statement, target, and whether the statement is in a loop of the scope."""
    in_loops = {
        id(inside)
        for loop in _nodes(scope, variable)
        if isinstance(loop, (ast.For, ast.AsyncFor, ast.While))
        for inside in _nodes(loop, variable)
    }
    for node in _nodes(scope, variable):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                    yield node, part, id(node) in in_loops
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node, node.target, id(node) in in_loops


def _bounds(node: ast.AST, variable: Variable) -> bool:
    """Whether a node removes, replaces or looks up what the variable holds, or compares how much it is."""
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in REMOVING:
            return _is(function.value, variable)
        return _last_name(function) in HEAPS and any(_is(argument, variable) for argument in node.args)
    if isinstance(node, (ast.Delete, ast.Assign)):
        subscripts = [target for target in node.targets if isinstance(target, ast.Subscript)]
        return any(
            _is(target.value, variable)
            and (isinstance(node, ast.Delete) or isinstance(target.slice, (ast.Slice, ast.BinOp)))
            for target in subscripts
        )
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        if any(isinstance(operator, (ast.In, ast.NotIn)) for operator in node.ops):
            return any(_is(part, variable) for part in parts[1:])
        return any(
            isinstance(part, ast.Call)
            and _last_name(part.func) == "len"
            and any(_is(argument, variable) for argument in part.args)
            for part in parts
        )
    return False


def _is(node: ast.expr, variable: Variable) -> bool:
    if variable.owner is not None:
        return isinstance(node, ast.Attribute) and node.attr == variable.name
    return isinstance(node, ast.Name) and node.id == variable.name


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
