"""What the script's sources say of a variable, an attribute, or the arguments of a call.

For a variable or attribute: where it is assigned, and what mentions it. For a call: which arguments have
chosen the length of a batch, asked by `padding.py` with the line at which a mask was made. Used by the
other modules of this folder that read sources. Reads them as syntax; executes nothing.
"""

from __future__ import annotations

import ast
import functools
import tokenize
from collections.abc import Iterator
from typing import NamedTuple

from grpo_run.runtime.rank.memory_trace.garbage import collections_postponed

MOST_BYTES = 2 * 1024 * 1024
"""Longest source that is read."""


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


class Called(ast.Load):
    """The context of an attribute that is called, as in `mask.all()`: a method, not a tensor or container of that name."""


_CALLED = Called()


@functools.lru_cache(maxsize=256)
def parsed(file: str) -> ast.Module | None:
    """Return the syntax of a source, in which methods have a context of their own; None if it cannot be read."""
    try:
        with tokenize.open(file) as source:
            text = source.read(MOST_BYTES)
        # a collection in the midst of it may run code that parses too, which CPython refuses
        with collections_postponed():
            tree = ast.parse(text)
            _tell_methods(tree)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    return tree


def _tell_methods(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        method = called_method(node)
        if method is not None:
            method.ctx = _CALLED


def called_method(node: ast.AST) -> ast.Attribute | None:
    """Return the method that a node calls, such as `kept.append` of `kept.append(x)`; None if it calls none."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func
    return None


def assigned_at(variable: Variable) -> int | None:
    """Return the line of the first assignment or definition, or else of the class or function around it.

    None if the source cannot be read.
    """
    tree = parsed(variable.file)
    if tree is None:
        return None
    scope = scope_of(tree, variable)
    lines = [
        node.lineno for node, target, _ in assignments_of(scope, variable) if is_variable(target, variable)
    ]
    if not lines and isinstance(scope, ast.ClassDef):
        own = variable._replace(owner=None)
        lines = [node.lineno for node, target, _ in assignments_of(scope, own) if is_variable(target, own)]
    if not lines and variable.owner is None:  # a function, as one with a cache
        lines = [
            node.lineno
            for node in ast.walk(scope)
            if node is not scope and isinstance(node, _DEFINITIONS) and node.name == variable.name
        ]
    return min(lines) if lines else getattr(scope, "lineno", None)


def first_assignments(scope: ast.AST, variable: Variable) -> set[int]:
    """Return the ids of statements that run where the variable has no value yet, as in `if kept is None: kept = new`."""
    return {
        id(inside)
        for node in nodes_of(scope, variable)
        if isinstance(node, ast.If)
        for statement in _branch_without_value(node, variable)
        for inside in ast.walk(statement)
    }


def _branch_without_value(node: ast.If, variable: Variable) -> list[ast.stmt]:
    """Return what runs if a variable has no value, or an object not the attribute; nothing if the condition asks something else."""
    test, has_value = node.test, True
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, has_value = test.operand, False
    asks = is_variable(test, variable)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        asks = any(mentions(part, variable) for part in (test.left, *test.comparators))
        if isinstance(test.ops[0], (ast.Is, ast.NotIn)):
            has_value = not has_value
        elif not isinstance(test.ops[0], (ast.IsNot, ast.In)):
            return []
    elif isinstance(test, ast.Call) and last_name(test.func) == "hasattr" and len(test.args) == 2:
        asks = isinstance(test.args[1], ast.Constant) and test.args[1].value == variable.name
    if not asks:
        return []
    return node.orelse if has_value else node.body


def mentions(node: ast.AST, variable: Variable) -> bool:
    """Whether a variable is anywhere in a part of a source."""
    return any(isinstance(one, ast.expr) and is_variable(one, variable) for one in ast.walk(node))


def is_assigned(variable: Variable) -> bool:
    """Whether a source defines or assigns a variable in the scope that has it; True if it cannot be read."""
    tree = parsed(variable.file)
    if tree is None:
        return True
    scope = scope_of(tree, variable)
    return any(is_variable(target, variable) for _, target, _ in assignments_of(scope, variable)) or any(
        isinstance(node, _DEFINITIONS) and node.name == variable.name for node in ast.walk(scope)
    )


def scopes_of(tree: ast.Module, variable: Variable) -> Iterator[ast.AST]:
    """The class, function or module that has the variable, and the classes of the file that inherit an attribute."""
    scope = scope_of(tree, variable)
    yield scope
    if variable.owner is not None and scope is not tree:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and variable.owner in {last_name(base) for base in node.bases}:
                yield node


def scope_of(tree: ast.Module, variable: Variable) -> ast.AST:
    wanted = variable.owner or variable.function
    kinds = (ast.ClassDef,) if variable.owner else (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree):
        if wanted is not None and isinstance(node, kinds) and node.name == wanted:
            return node
    return tree


def nodes_of(scope: ast.AST, variable: Variable) -> Iterator[ast.AST]:
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


NAMED_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*NAMED_FUNCTIONS, ast.ClassDef)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def assignments_of(scope: ast.AST, variable: Variable) -> Iterator[tuple[ast.stmt, ast.expr, bool]]:
    """Yield statement, target, and whether the statement is in a loop of the scope."""
    in_loops = {
        id(inside)
        for loop in nodes_of(scope, variable)
        if isinstance(loop, (ast.For, ast.AsyncFor, ast.While))
        for inside in nodes_of(loop, variable)
    }
    for node in nodes_of(scope, variable):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                for part in target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]:
                    yield node, part, id(node) in in_loops
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield node, node.target, id(node) in in_loops


def is_variable(node: ast.expr, variable: Variable) -> bool:
    if variable.owner is not None:
        return (
            isinstance(node, ast.Attribute)
            and node.attr == variable.name
            and not isinstance(node.ctx, Called)
        )
    return isinstance(node, ast.Name) and node.id == variable.name


def last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


LENGTHS = ("padding", "max_length", "pad_to_multiple_of")
"""Arguments of transformers' tokenizers and collators that choose a length, and of functions that pass them on."""
MOST_CHARACTERS = 120


def length_arguments(file: str, line: int) -> str | None:
    """Return the call at a line with its arguments that choose a length, as `tokenizer(padding="max_length")`.

    None if there is no such call, or more than one, or if the source cannot be read.
    """
    tree = parsed(file)
    if tree is None:
        return None
    found = [
        (node, chosen)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or node.lineno)
        if (chosen := [one for one in node.keywords if one.arg in LENGTHS])
    ]
    if len(found) != 1:
        return None
    ((call, chosen),) = found
    arguments = ", ".join(f"{one.arg}={ast.unparse(one.value)}" for one in chosen)
    text = f"{ast.unparse(call.func)}({arguments})".replace("'", '"')
    return text if len(text) <= MOST_CHARACTERS and "\n" not in text else None
