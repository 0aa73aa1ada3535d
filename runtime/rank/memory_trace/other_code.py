"""Whether other code than that of a variable bounds what a container holds: its own class, methods for all attributes, and links. Reads sources.

Used by `holders.py`, beside `container_bounds.py`.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from grpo_run.runtime.rank.memory_trace.container_bounds import bounds
from grpo_run.runtime.rank.memory_trace.script_files import sources_with
from grpo_run.runtime.rank.memory_trace.sources import (
    NAMED_FUNCTIONS,
    Variable,
    called_method,
    is_variable,
    last_name,
    parsed,
)


def bounds_itself(file: str, kind: str) -> bool:
    """Whether the code of a container's own class removes or replaces what it holds: `self.popitem()`."""
    itself = Variable(file, "self")
    return any(bounds(node, itself) for node in _nodes_of_class(file, kind))


def is_reset(file: str, kind: str, attribute: str) -> bool:
    """Whether a method of a class sets attributes whose names it computes, such as all states of a metric, or runs `__init__` again."""
    return any(_resets(node, attribute) for node in _nodes_of_class(file, kind))


def _nodes_of_class(file: str, kind: str) -> Iterator[ast.AST]:
    tree = parsed(file)
    for owner in ast.walk(tree) if tree is not None else ():
        if isinstance(owner, ast.ClassDef) and owner.name == kind:
            yield from ast.walk(owner)


def _resets(node: ast.AST, attribute: str) -> bool:
    method = called_method(node)
    if method is not None and method.attr == "__init__":
        return isinstance(method.value, ast.Name) and method.value.id == "self"
    if method is not None and method.attr in ("clear", "update"):
        return _is_namespace(method.value) or (
            method.attr == "clear" and _is_computed(method.value, attribute, ("getattr",))
        )
    return _is_computed(node, attribute, ("setattr", "delattr"))


def _is_namespace(node: ast.expr) -> bool:
    """Whether an expression is the attributes of an object: `vars(self)` or `self.__dict__`."""
    return last_name(node.func if isinstance(node, ast.Call) else node) in ("vars", "__dict__")


def _is_computed(node: ast.AST, attribute: str, functions: Collection[str]) -> bool:
    """Whether a call names an attribute of `self` by an expression that may be this one."""
    if not isinstance(node, ast.Call) or last_name(node.func) not in functions or len(node.args) < 2:
        return False
    owner, name = node.args[:2]
    if not (isinstance(owner, ast.Name) and owner.id == "self"):
        return False
    return name.value == attribute if isinstance(name, ast.Constant) else True


def is_set_anew(variable: Variable) -> bool:
    """Whether a context variable is set in a loop or in several places."""
    tree = parsed(variable.file)
    if tree is None:
        return True
    sets = [
        node
        for node in ast.walk(tree)
        if (method := called_method(node)) is not None and method.attr == "set"
        if is_variable(method.value, variable)
    ]
    loops = [node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.AsyncFor, ast.While))]
    return len(sets) > 1 or any(one is inside for loop in loops for inside in ast.walk(loop) for one in sets)


def is_chain_cut(links: frozenset[str], files: Iterable[str]) -> bool:
    """Whether code takes objects out of a chain: `first = first.next`, `one.next = None`, or `del one.next`.

    Args:
        links: attributes through which objects refer to each other.
        files: of the script.
    """
    trees = sources_with(files, attributes=links)
    if trees is None:
        return True
    for tree in trees:
        begun = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, NAMED_FUNCTIONS) and function.name == "__init__"
            for node in ast.walk(function)
        }
        if any(_cuts_chain(node, links) for node in ast.walk(tree) if id(node) not in begun):
            return True
    return False


def _cuts_chain(node: ast.AST, links: frozenset[str]) -> bool:
    if not isinstance(node, (ast.Assign, ast.Delete)):
        return False
    linked = any(isinstance(target, ast.Attribute) and target.attr in links for target in node.targets)
    if isinstance(node, ast.Delete):
        return linked
    value = node.value
    if isinstance(value, ast.Attribute):
        return value.attr in links
    return linked and isinstance(value, ast.Constant)
