"""Whether a script's code bounds a tensor that it extends, or cuts off the autograd graph that ends in one. Reads sources, and where the script is.

Used by `tracer.py` and `holders.py` for tensors that a variable or attribute holds, itself or in a container. `container_bounds.py` does the same
for containers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable

from grpo_run.runtime.rank.memory_trace.referrers import running_lines
from grpo_run.runtime.rank.memory_trace.script_files import is_made_anew, other_sources_with
from grpo_run.runtime.rank.memory_trace.sources import (
    Variable,
    assignments_of,
    called_method,
    first_assignments,
    is_variable,
    last_name,
    mentions,
    nodes_of,
    parsed,
    scopes_of,
)

SHORTENING = frozenset(
    {"narrow", "split", "chunk", "tensor_split", "pop", "popitem", "clear", "resize_", "set_"}
)
"""Methods of a tensor, or of the container that holds it, that may bound how much is kept."""
CONCATENATING = frozenset(
    {"cat", "concat", "concatenate", "vstack", "hstack", "dstack", "row_stack", "column_stack", "pad"}
)
"""Functions of torch that make a tensor longer."""
COPYING = frozenset(
    {"clone", "detach", "contiguous", "cpu", "cuda", "to", "float", "double", "half", "long", "int"}
)
"""Methods of a tensor whose result is as long."""
CUTTING = frozenset({"detach", "detach_", "backward", "pop", "clear"})
"""Methods after which a tensor has no graph, or that of nothing before."""


def is_length_bounded(variable: Variable, also: Iterable[str] = ()) -> bool:
    """Whether code slices, measures, deletes or replaces a tensor that a variable holds, so that it may stop growing.

    Args:
        variable: the tensor's, or that of a container that holds it.
        also: other files of the script, where an attribute may be used.
    """
    files = tuple(also)
    return (
        not _is_extended_in_sight(variable, files)
        or _any(variable, files, _shortens)
        or _is_begun_anew(variable)
        or is_made_anew(variable, files, running_lines())
    )


def is_graph_cut(variable: Variable, also: Iterable[str] = ()) -> bool:
    """Whether code detaches what a variable holds, or runs backward from it.

    Args:
        variable: the tensor's, or that of a container that holds it.
        also: other files of the script, where an attribute may be used.
    """

    def cuts(node: ast.AST, of: Variable) -> bool:
        method = called_method(node)
        return _is_deleted(node, of) or (
            method is not None and method.attr in CUTTING and mentions(method.value, of)
        )

    return _any(variable, also, cuts)


def _is_deleted(node: ast.AST, variable: Variable) -> bool:
    return isinstance(node, ast.Delete) and any(mentions(target, variable) for target in node.targets)


def _any(variable: Variable, also: Iterable[str], test: Callable[[ast.AST, Variable], bool]) -> bool:
    tree = parsed(variable.file)
    if tree is None:
        return True  # nothing is known of it
    if any(test(node, variable) for scope in scopes_of(tree, variable) for node in nodes_of(scope, variable)):
        return True
    if variable.owner is None:
        return False
    others = other_sources_with(variable, also)
    if others is None:
        return True
    return any(test(node, variable) for other in (tree, *others) for node in ast.walk(other))


def _shortens(node: ast.AST, variable: Variable) -> bool:
    if isinstance(node, ast.Subscript):
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return any(isinstance(part, ast.Slice) and (part.lower or part.upper) for part in parts) and mentions(
            node.value, variable
        )
    if isinstance(node, ast.Compare):
        sizes = not any(isinstance(one, (ast.In, ast.NotIn, ast.Is, ast.IsNot)) for one in node.ops)
        return sizes and any(mentions(part, variable) for part in (node.left, *node.comparators))
    if isinstance(node, ast.Call) and (method := called_method(node)) is not None:
        used = (method.value, *node.args)
        return method.attr in SHORTENING and any(mentions(one, variable) for one in used)
    return _is_deleted(node, variable)


def _is_extended_in_sight(variable: Variable, also: Iterable[str]) -> bool:
    """Whether each new value that is made of something is all that there was and more, as in `x = torch.cat([x, new])`.

    What a function of the script returns may be any part of it.
    """
    tree = parsed(variable.file)
    if tree is None:
        return False
    if variable.owner is None:
        nodes = [node for scope in scopes_of(tree, variable) for node in nodes_of(scope, variable)]
    else:
        others = other_sources_with(variable, also)
        if others is None:
            return False
        nodes = [node for one in (tree, *others) for node in ast.walk(one)]
    values = [
        node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if is_variable(target.value if isinstance(target, ast.Subscript) else target, variable)
    ]
    branches = [
        part
        for value in values
        for part in ([value.body, value.orelse] if isinstance(value, ast.IfExp) else [value])
    ]
    made = [one for one in branches if isinstance(one, (ast.Call, ast.Subscript, ast.BinOp))]
    return any(map(_concatenates, made)) and not any(
        mentions(one, variable) or _has_slice(one) for one in made if not _concatenates(one)
    )


def _concatenates(value: ast.expr) -> bool:
    while (method := called_method(value)) is not None and method.attr in COPYING:
        value = method.value
    return isinstance(value, ast.Call) and last_name(value.func) in CONCATENATING


def _has_slice(value: ast.expr) -> bool:
    return any(isinstance(one, ast.Slice) for one in ast.walk(value))


def _is_begun_anew(variable: Variable) -> bool:
    """Whether a variable is assigned something else than what it was made longer to, in a loop or in several places.

    The first assignment is none, also if it is made where there is no tensor yet: `if kept is None: kept = new`.
    """
    tree = parsed(variable.file)
    if tree is None:
        return True
    assigned = 0
    for scope in scopes_of(tree, variable):
        first = first_assignments(scope, variable)
        for statement, target, in_loop in assignments_of(scope, variable):
            place = target.value if isinstance(target, ast.Subscript) else target
            if not is_variable(place, variable) or id(statement) in first:
                continue
            value = getattr(statement, "value", None)
            if isinstance(value, ast.AST) and mentions(value, variable):
                continue
            assigned += 1
            if in_loop:
                return True
    return assigned > 1
