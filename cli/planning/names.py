"""The names of a script by Python's scopes: what binds them, and how often. Used by `expressions.py`.

Nothing is executed. A name that its scope binds once has that value wherever it can be read at all, so the order of statements does
not matter; a name that is bound again, by any statement, has no value that could be known. Comprehensions count to the scope around
them, which can only bind a name once more.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(kw_only=True, eq=False)
class Binding:
    """A name in one scope.

    Attributes:
        times: how often it is bound.
        value: the expression that it was last bound to, if it is bound to one.
        touched: an attribute or an item of it is used in a way that may change it.
    """

    times: int = 0
    value: ast.expr | None = None
    touched: bool = False


@dataclass(kw_only=True, eq=False)
class _Scope:
    around: _Scope | None
    is_class: bool = False
    names: dict[str, Binding] = field(default_factory=dict)
    declared_global: set[str] = field(default_factory=set)
    declared_nonlocal: set[str] = field(default_factory=set)


class Names:
    """The names of a script.

    Args:
        tree: of its syntax.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._module = _Scope(around=None)
        self._scope_of: dict[int, _Scope] = {}
        self._bound: list[tuple[_Scope, str, ast.expr | None]] = []
        self._touched: list[ast.Name] = []
        self._paired: set[int] = set()
        waiting: list[tuple[ast.AST, _Scope]] = [(tree, self._module)]
        while waiting:
            node, scope = waiting.pop()
            waiting.extend(self._visit(node, scope))
        for scope, name, value in self._bound:
            for owner in self._owners(scope, name):
                binding = owner.names.setdefault(name, Binding())
                binding.times += 1
                binding.value = value
        for one in self._touched:
            if (found := self.find(one)) is not None:
                found.touched = True

    def find(self, name: ast.Name) -> Binding | None:
        """Return what a name of the tree means where it stands; None if the script does not bind it."""
        here = self._scope_of.get(id(name), self._module)  # those of annotations are not followed
        scope: _Scope | None = here
        while scope is not None:
            if name.id in scope.declared_global:
                return self._module.names.get(name.id)
            if name.id in scope.names and (scope is here or not scope.is_class):
                return scope.names[name.id]
            scope = scope.around
        return None

    def _owners(self, scope: _Scope, name: str) -> Iterator[_Scope]:
        if name in scope.declared_global:
            yield self._module
        elif name in scope.declared_nonlocal:
            around = scope.around
            while around is not None:
                yield around
                around = around.around
        else:
            yield scope

    def _visit(self, node: ast.AST, scope: _Scope) -> Iterator[tuple[ast.AST, _Scope]]:
        """Note what a node binds; yields its parts with the scopes in which they are."""
        if isinstance(node, (*_FUNCTIONS, ast.Lambda, ast.ClassDef)):
            yield from self._visit_scope(node, scope)
            return
        if isinstance(node, ast.Name):
            self._scope_of[id(node)] = scope
            if not isinstance(node.ctx, ast.Load) and id(node) not in self._paired:
                self._bound.append((scope, node.id, None))
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                self._pair(target, node.value, scope)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            if node.value is not None:
                self._pair(node.target, node.value, scope)
            elif isinstance(node.target, ast.Name):
                self._paired.add(id(node.target))  # a declaration of a type binds nothing
        elif isinstance(node, ast.Global):
            scope.declared_global.update(node.names)
        elif isinstance(node, ast.Nonlocal):
            scope.declared_nonlocal.update(node.names)
        else:
            self._bound += [(scope, name, None) for name in _other_names(node)]
        if isinstance(node, ast.Attribute) or (
            isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        ):
            self._touch(node)
        for part in ast.iter_child_nodes(node):
            yield part, scope

    def _visit_scope(self, node: Any, scope: _Scope) -> Iterator[tuple[ast.AST, _Scope]]:
        """A function's defaults and decorators, and a class's bases, are outside of its scope."""
        inner = _Scope(around=scope, is_class=isinstance(node, ast.ClassDef))
        if not isinstance(node, ast.Lambda):
            self._bound.append((scope, node.name, None))
            yield from ((part, scope) for part in node.decorator_list)
        if isinstance(node, ast.ClassDef):
            yield from ((part, scope) for part in (*node.bases, *node.keywords))
        else:
            arguments = node.args
            yield from (
                (part, scope)
                for part in (*arguments.defaults, *arguments.kw_defaults, getattr(node, "returns", None))
                if part is not None
            )
            every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
            for one in (*every, arguments.vararg, arguments.kwarg):
                if one is not None:
                    self._bound.append((inner, one.arg, None))
        body = [node.body] if isinstance(node, ast.Lambda) else node.body
        yield from ((part, inner) for part in body)

    def _pair(self, target: ast.expr, value: ast.expr, scope: _Scope) -> None:
        """Bind a target to its value; `a, b = 1, 2` binds two."""
        if isinstance(target, ast.Name):
            self._paired.add(id(target))
            self._bound.append((scope, target.id, value))
        elif isinstance(target, (ast.Tuple, ast.List)) and isinstance(value, (ast.Tuple, ast.List)):
            starred = any(isinstance(one, ast.Starred) for one in (*target.elts, *value.elts))
            if not starred and len(target.elts) == len(value.elts):
                for one, its_value in zip(target.elts, value.elts, strict=True):
                    if isinstance(one, ast.Name):
                        self._pair(one, its_value, scope)

    def _touch(self, node: ast.expr) -> None:
        while isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        if isinstance(node, ast.Name):
            self._touched.append(node)


def _other_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds without an `ast.Name`."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        yield from (one.asname or one.name.partition(".")[0] for one in node.names)
    elif isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)):
        if node.name is not None:
            yield node.name
    elif isinstance(node, ast.MatchMapping) and node.rest is not None:
        yield node.rest
