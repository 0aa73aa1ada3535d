"""Evaluate a script's expressions as far as its text determines their values. Used by `script.py`.

Literals, names that are bound once, arithmetic, texts, and a few functions without effects. Nothing of the script is executed, and
what is computed is bounded in size and depth: an expression beyond the bounds has no known value, as one with an unknown part.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from grpo_run.cli.planning.names import Binding, Names

UNKNOWN = object()
"""Stands for the value of an expression that is not known."""
UNKNOWN_KEYS = "**"
"""Key of a dictionary that has more keys, which are not known."""
MAX_BITS = 64
"""Of a whole number that is computed. No setting of a job needs as many."""
MAX_TEXT = 4096
"""Characters of a text that is put together."""
MAX_WEIGHT = 512
"""Of a collection: its parts, at all depths, and one more for each 64 characters of a text."""
MAX_DEPTH = 64
"""Of expressions within expressions, those behind names included."""
_NUMERIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
_UNARY: dict[type[ast.AST], Callable[[Any], Any]] = {ast.USub: operator.neg, ast.UAdd: operator.pos}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "bool": bool,
    "float": float,
    "int": int,
    "max": max,
    "min": min,
    "round": lambda value: round(value),  # to a whole number only: a number of digits has no bound
}
_ERRORS = (ArithmeticError, TypeError, ValueError, RecursionError)


class Expressions:
    """Values of the expressions of one script.

    Args:
        names: of the script.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._values: dict[Binding, Any] = {}
        self._depth = 0

    def value(self, node: ast.expr) -> Any:
        """Return the value of an expression; `UNKNOWN` if it does not follow from what is written.

        A dictionary may have unknown values. Its keys are texts.
        """
        if self._depth == MAX_DEPTH:
            return UNKNOWN
        self._depth += 1
        try:
            return self._value(node)
        except _ERRORS:
            return UNKNOWN
        finally:
            self._depth -= 1

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.Attribute):
            return node.attr if getattr(node.value, "id", "") == "torch" else UNKNOWN
        if isinstance(node, ast.UnaryOp):
            return self._unary(node)
        if isinstance(node, ast.BinOp):
            return _binary(node.op, self.value(node.left), self.value(node.right))
        if isinstance(node, ast.IfExp):
            test = self.value(node.test)
            return UNKNOWN if test is UNKNOWN else self.value(node.body if test else node.orelse)
        if isinstance(node, ast.JoinedStr):
            return self._text(node)
        if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
            return self._collection(node)
        if isinstance(node, ast.Dict):
            return self._dictionary(node)
        if isinstance(node, ast.Subscript):
            return self._item(node)
        return self._called(node) if isinstance(node, ast.Call) else UNKNOWN

    def _named(self, node: ast.Name) -> Any:
        binding = self._names.find(node)
        if binding is None or binding.times != 1 or binding.value is None:
            return UNKNOWN
        if binding not in self._values:
            self._values[binding] = UNKNOWN  # what a name that is part of its own value has
            self._values[binding] = self.value(binding.value)
        found = self._values[binding]
        return UNKNOWN if binding.touched and isinstance(found, (list, dict, set)) else found

    def _unary(self, node: ast.UnaryOp) -> Any:
        value = self.value(node.operand)
        if value is UNKNOWN:
            return UNKNOWN
        if isinstance(node.op, ast.Not):
            return not value
        apply = _UNARY.get(type(node.op))
        return apply(value) if apply is not None and _is_number(value) else UNKNOWN

    def _text(self, node: ast.JoinedStr) -> Any:
        parts = []
        for one in node.values:
            if isinstance(one, ast.FormattedValue):
                if one.format_spec is not None or one.conversion not in (-1, ord("s")):
                    return UNKNOWN
                value = self.value(one.value)
            else:
                value = self.value(one)
            if not isinstance(value, (str, int, float)):
                return UNKNOWN
            parts.append(str(value))
        return _bounded("".join(parts)) if sum(map(len, parts)) <= MAX_TEXT else UNKNOWN

    def _collection(self, node: ast.List | ast.Tuple | ast.Set) -> Any:
        found: list[Any] = []
        for one in node.elts:
            value = self.value(one.value if isinstance(one, ast.Starred) else one)
            if isinstance(one, ast.Starred):
                if not isinstance(value, (list, tuple)):
                    return UNKNOWN
                found += value
            elif value is UNKNOWN:
                return UNKNOWN
            else:
                found.append(value)
            if len(found) > MAX_WEIGHT:
                return UNKNOWN
        kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
        return _bounded(kind(found))

    def _dictionary(self, node: ast.Dict) -> Any:
        found: dict[str, Any] = {}
        for key_node, value_node in zip(node.keys, node.values, strict=True):
            value = self.value(value_node)
            key = UNKNOWN if key_node is None else self.value(key_node)
            if key_node is None and isinstance(value, dict):
                found.update(value)
            elif key is UNKNOWN:
                found[UNKNOWN_KEYS] = UNKNOWN
            else:
                found[str(key)] = value
        return _bounded(found)

    def _item(self, node: ast.Subscript) -> Any:
        holder, key = self.value(node.value), self.value(node.slice)
        if isinstance(holder, dict) and isinstance(key, str):
            return UNKNOWN if UNKNOWN_KEYS in holder else holder.get(key, UNKNOWN)
        if isinstance(holder, (list, tuple)) and isinstance(key, int) and -len(holder) <= key < len(holder):
            return holder[key]
        return UNKNOWN

    def _called(self, node: ast.Call) -> Any:
        if not isinstance(node.func, ast.Name) or self._names.find(node.func) is not None:
            return UNKNOWN
        if node.func.id == "dict" and not node.args:
            return self._dictionary(
                ast.Dict(
                    keys=[None if one.arg is None else ast.Constant(one.arg) for one in node.keywords],
                    values=[one.value for one in node.keywords],
                )
            )
        function = _FUNCTIONS.get(node.func.id)
        given = [self.value(one) for one in node.args]
        if function is None or node.keywords or not all(isinstance(one, (str, int, float)) for one in given):
            return UNKNOWN
        if any(isinstance(one, str) and len(one) > MAX_BITS for one in given):
            return UNKNOWN
        return _bounded(function(*given))


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(left, (str, list, tuple)) and type(left) is type(right):
        short = isinstance(op, ast.Add) and len(left) + len(right) <= MAX_TEXT
        return _bounded(operator.add(left, right)) if short else UNKNOWN
    apply = _NUMERIC.get(type(op))
    if apply is None or not (_is_number(left) and _is_number(right)):
        return UNKNOWN
    if isinstance(op, ast.Pow) and isinstance(left, int) and right * left.bit_length() > MAX_BITS:
        return UNKNOWN
    if isinstance(op, ast.LShift) and right > MAX_BITS:
        return UNKNOWN
    return _bounded(apply(left, right))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and _bounded(value) is not UNKNOWN


def _bounded(value: Any) -> Any:
    """Return a computed value, or `UNKNOWN` if it is no usual one or beyond the bounds."""
    if isinstance(value, int):
        return value if value.bit_length() <= MAX_BITS else UNKNOWN
    if isinstance(value, float):
        return value if math.isfinite(value) else UNKNOWN
    if isinstance(value, str):
        return value if len(value) <= MAX_TEXT else UNKNOWN
    if isinstance(value, (list, tuple, set, dict)):
        return value if _weight(value) <= MAX_WEIGHT else UNKNOWN
    return UNKNOWN


def _weight(value: Any) -> int:
    """Return how much there is in a value, counting on until it is too much."""
    total, waiting = 0, [value]
    while waiting and total <= MAX_WEIGHT:
        one = waiting.pop()
        total += 1 + len(one) // 64 if isinstance(one, (str, bytes)) else 1
        if isinstance(one, Mapping):
            waiting += [*one, *one.values()]
        elif isinstance(one, (list, tuple, set)):
            waiting += one
    return total
