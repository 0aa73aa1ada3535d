"""Whether a script's code bounds what a list, dictionary, or other container holds. Reads sources; executes nothing.

Used by `holders.py`. `tensor_bounds.py` does the same for tensors that are made longer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable

from grpo_run.trainers.memory_trace.holding.script_files import other_sources_with, sources_with
from grpo_run.trainers.memory_trace.holding.sources import (
    NAMED_FUNCTIONS,
    Variable,
    assignments_of,
    called_method,
    first_assignments,
    is_variable,
    last_name,
    nodes_of,
    parsed,
    scope_of,
    scopes_of,
)

REMOVING = frozenset({"pop", "popleft", "popitem", "clear", "remove", "discard", "get", "setdefault"})
"""Methods that remove something, or look it up as a cache does."""
HEAPS = frozenset({"heappop", "heapreplace", "heappushpop"})


def is_bounded(variable: Variable, also: Iterable[str] = ()) -> bool:
    """Whether code removes, replaces or looks up what the variable holds, so that it may stop growing.

    True if more files use it than are read.

    Args:
        also: other files, where an attribute may be used through another name than `self`.
    """
    tree = parsed(variable.file)
    if tree is None:
        return False
    assigned = 0
    for scope in scopes_of(tree, variable):
        first = first_assignments(scope, variable)
        for statement, target, in_loop in assignments_of(scope, variable):
            if id(statement) in first or _extends(statement, variable):
                continue
            if is_variable(target, variable):
                assigned += 1
                if in_loop:
                    return True
        if any(_bounds(node, variable) for node in nodes_of(scope, variable)):
            return True
        if _is_bounded_by_other_name(scope, variable):
            return True
    files = tuple(also)
    if variable.owner is not None:
        others = other_sources_with(variable, files)
        if others is None:
            return True
        counted = {id(node) for scope in scopes_of(tree, variable) for node in ast.walk(scope)}
        assigned += sum(
            _sets_from_outside(node, variable)
            for one in (tree, *others)
            for node in ast.walk(one)
            if id(node) not in counted
        )
        if any(_bounds(node, variable) for other in others for node in ast.walk(other)):
            return True
        if any(_is_bounded_by_other_name(one, variable) for one in (tree, *others)):
            return True
    if assigned > 1:
        return True
    calls = [node for node in nodes_of(scope_of(tree, variable), variable) if isinstance(node, ast.Call)]
    return any(_bounds_argument(call, variable, tree, files) for call in calls)


def is_set_by_place(variable: Variable, also: Iterable[str] = ()) -> bool:
    """Whether code assigns places of a list, which makes it no longer. True if more files use it than are read.

    Args:
        also: other files, where an attribute may be used.
    """
    tree = parsed(variable.file)
    if tree is None:
        return False
    others = other_sources_with(variable, also) if variable.owner is not None else []
    if others is None:
        return True
    scopes = [node for scope in scopes_of(tree, variable) for node in nodes_of(scope, variable)]
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Store)
        and is_variable(node.value, variable)
        for nodes in (scopes, *map(ast.walk, others))
        for node in nodes
    )


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


def _extends(statement: ast.stmt, variable: Variable) -> bool:
    """Whether an assignment puts all that a variable holds into its new value, as `kept = kept + [new]` and `last = (new, last)`."""
    value = getattr(statement, "value", None)
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        parts = [value.left, value.right]
    else:
        parts = list(value.elts) if isinstance(value, (ast.Tuple, ast.List)) else []
        targets = getattr(statement, "targets", [])
        if any(isinstance(target, (ast.Tuple, ast.List)) for target in targets):
            return False  # the parts are for several variables
    return any(is_variable(part.value if isinstance(part, ast.Starred) else part, variable) for part in parts)


def _is_bounded_by_other_name(scope: ast.AST, variable: Variable) -> bool:
    """Whether a function gives the object another name, and bounds it by that: `items = self.items`."""
    for function in ast.walk(scope):
        if not isinstance(function, NAMED_FUNCTIONS):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign) or not is_variable(node.value, variable):
                continue
            for target in node.targets:
                if isinstance(target, ast.Name):
                    other = Variable(variable.file, target.id)
                    if any(_bounds(one, other) for one in ast.walk(function)):
                        return True
    return False


def _sets_from_outside(node: ast.AST, variable: Variable) -> bool:
    """Whether a statement assigns the attribute of another object than `self`."""
    return isinstance(node, ast.Assign) and any(
        isinstance(target, ast.Attribute)
        and target.attr == variable.name
        and not (isinstance(target.value, ast.Name) and target.value.id == "self")
        for target in node.targets
    )


def _bounds_argument(call: ast.Call, variable: Variable, tree: ast.Module, files: Iterable[str]) -> bool:
    """Whether a function of the script that is called with the variable bounds what that holds."""
    given: list[int | str | None] = [
        position for position, argument in enumerate(call.args) if is_variable(argument, variable)
    ]
    given += [keyword.arg for keyword in call.keywords if is_variable(keyword.value, variable)]
    called = last_name(call.func)
    if not given or called is None:
        return False
    others = sources_with((file for file in files if file != variable.file), functions=[called])
    if others is None:
        return True
    for function in (node for one in (tree, *others) for node in ast.walk(one)):
        if not isinstance(function, NAMED_FUNCTIONS) or function.name != called:
            continue
        names = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
        if isinstance(call.func, ast.Attribute) and names[:1] in (["self"], ["cls"]):
            del names[0]
        for one in given:
            name = one if isinstance(one, str) or one is None else next(iter(names[one : one + 1]), None)
            if name is not None and any(
                _bounds(node, Variable(variable.file, name)) for node in ast.walk(function)
            ):
                return True
    return False


def _bounds(node: ast.AST, variable: Variable) -> bool:
    """Whether a node removes, replaces or looks up what the variable holds, or compares how much it is."""
    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in REMOVING:
            return is_variable(function.value, variable)
        return last_name(function) in HEAPS and any(is_variable(argument, variable) for argument in node.args)
    if isinstance(node, (ast.Delete, ast.Assign)):
        subscripts = [target for target in node.targets if isinstance(target, ast.Subscript)]
        return any(
            is_variable(target.value, variable)
            and (
                isinstance(node, ast.Delete)
                or isinstance(target.slice, (ast.Slice, ast.BinOp))
                or _is_part(node.value)
            )
            for target in subscripts
        )
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        if any(isinstance(operator, (ast.In, ast.NotIn)) for operator in node.ops):
            return any(is_variable(part, variable) for part in parts[1:])
        return any(
            isinstance(part, ast.Call)
            and last_name(part.func) == "len"
            and any(is_variable(argument, variable) for argument in part.args)
            for part in parts
        )
    return False


def _is_part(value: ast.expr) -> bool:
    """Whether a value is a slice, as in `kept["last"] = (kept["last"] + [new])[-8:]`."""
    return isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)
