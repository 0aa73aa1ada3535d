"""Whether a script's override of a trainer's method only passes on the original's result.

Such a method logs, measures or raises; the loss stays the trainer's own, so a micro-batch may be split. Judged by the source, as
syntax: what it returns is what the trainer's method has returned, for the arguments that it was given, and nothing is changed
on the way. Anything else, and a source that cannot be read, counts as a computation of the script's own. Called by `facts.py`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

_NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


def passes_on(method: Any, name: str) -> bool:
    """Whether a function returns what the trainer's method of that name returns, unchanged."""
    function = getattr(method, "__func__", method)
    try:
        # of the code, because for a function with `functools.wraps` it would be the source of the wrapped one
        module = ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))
    except (AttributeError, OSError, TypeError, SyntaxError, ValueError):
        return False
    if len(module.body) != 1 or not isinstance(module.body[0], ast.FunctionDef):
        return False
    return _Reading(module.body[0], name, _originals(function, name)).passes_on


def _originals(function: Any, name: str) -> frozenset[str]:
    """Return the variables of a function by which it calls the method that it was put in the place of."""
    try:
        variables = inspect.getclosurevars(function)
    except TypeError:
        return frozenset()
    known = {**variables.globals, **variables.nonlocals}
    return frozenset(
        word for word, value in known.items() if getattr(value, "__name__", None) == name and callable(value)
    )


class _Reading:
    """One function as syntax."""

    def __init__(self, function: ast.FunctionDef, name: str, originals: frozenset[str]) -> None:
        self._name, self._originals = name, originals
        self._nodes = list(_own_nodes(function))
        given = function.args
        self._parameters = {
            one.arg
            for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg)
            if one is not None
        }
        self._stores = [
            node.id for node in self._nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        ]
        self._results = set(self._names_of_results())

    @property
    def passes_on(self) -> bool:
        returns = [node for node in self._nodes if isinstance(node, ast.Return)]
        return (
            bool(returns)
            and not self._parameters & set(self._stores)
            and all(node.value is not None and self._is_result(node.value) for node in returns)
            and not any(self._changes(node) for node in self._nodes)
        )

    def _names_of_results(self) -> Iterator[str]:
        for node in self._nodes:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and self._delegates(node.value):
                target = node.targets[0]
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                yield from (
                    part.id
                    for part in parts
                    if isinstance(part, ast.Name) and self._stores.count(part.id) == 1
                )

    def _is_result(self, value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            return self._is_result(value.body) and self._is_result(value.orelse)
        if isinstance(value, ast.Tuple):
            return all(self._is_result(part) for part in value.elts)
        return self._delegates(value) or (isinstance(value, ast.Name) and value.id in self._results)

    def _delegates(self, value: ast.expr) -> bool:
        """Whether it is a call of the trainer's own method with what was given."""
        if not isinstance(value, ast.Call):
            return False
        called = value.func
        own = isinstance(called, ast.Attribute) and called.attr == self._name and _is_of_class(called, value)
        if not own and not (isinstance(called, ast.Name) and called.id in self._originals):
            return False
        passed = [*value.args, *(keyword.value for keyword in value.keywords)]
        return all(self._is_given(argument) for argument in passed)

    def _is_given(self, argument: ast.expr) -> bool:
        if isinstance(argument, ast.Starred):
            argument = argument.value
        return isinstance(argument, ast.Constant) or (
            isinstance(argument, ast.Name) and argument.id in self._parameters
        )

    def _changes(self, node: ast.AST) -> bool:
        """Whether it may change a result or an argument in place."""
        if isinstance(node, (ast.Subscript, ast.Attribute)) and isinstance(node.ctx, (ast.Store, ast.Del)):
            return self._root(node) in self._results | (self._parameters - {"self"})
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            in_place = method.endswith("_") or method in ("update", "pop", "setdefault", "clear")
            return in_place and self._root(node.func) in self._results | (self._parameters - {"self"})
        return False

    @staticmethod
    def _root(node: ast.expr) -> str:
        while isinstance(node, (ast.Subscript, ast.Attribute)):
            node = node.value
        return node.id if isinstance(node, ast.Name) else ""


def _is_of_class(called: ast.Attribute, call: ast.Call) -> bool:
    """Whether a method is called as `super().method(…)` or `Class.method(self, …)`."""
    holder = called.value
    if isinstance(holder, ast.Call):
        return isinstance(holder.func, ast.Name) and holder.func.id == "super"
    first = call.args[0] if call.args else None
    return isinstance(holder, ast.Name) and isinstance(first, ast.Name) and first.id == "self"


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _NESTED):
            waiting.extend(ast.iter_child_nodes(node))
