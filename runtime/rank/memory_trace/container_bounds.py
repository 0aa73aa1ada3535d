"""Whether a script's code bounds what a list, dictionary, or other container holds. Reads sources; executes nothing.

Used by `holders.py`. `tensor_bounds.py` does the same for tensors that are made longer.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from grpo_run.runtime.rank.memory_trace.script_files import other_sources_with, sources_with
from grpo_run.runtime.rank.memory_trace.sources import (
    NAMED_FUNCTIONS,
    Variable,
    assignments_of,
    called_method,
    first_assignments,
    is_variable,
    last_name,
    mentions,
    nodes_of,
    parsed,
    scope_of,
    scopes_of,
)

LOOKING_UP = frozenset({"get", "setdefault"})
REMOVING = LOOKING_UP | {"pop", "popleft", "popitem", "clear", "remove", "discard"}
"""Methods that remove something, or look it up as a cache does."""
REPEATED = re.compile("epoch|step|batch|eval|reset|clear|flush|rollout|episode", re.IGNORECASE)
"""Names of methods that a script or a framework calls often, such as `on_epoch_begin`."""
HEAPS = frozenset({"heappop", "heapreplace", "heappushpop"})


def is_bounded(variable: Variable, also: Iterable[str] = (), *, inside: bool = False) -> bool:
    """Whether code removes, replaces or looks up what the variable holds, so that it may stop growing.

    True if more files use it than are read.

    Args:
        also: other files, where an attribute may be used through another name than `self`.
        inside: the container in question has no name of its own, and is in what the variable holds: `kept["logits"]`.
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
        if any(bounds(node, variable, inside=inside) for node in nodes_of(scope, variable)) or _is_begun_anew(
            scope, variable
        ):
            return True
        if _is_bounded_by_other_name(scope, variable, inside=inside):
            return True
        if _bounds_parts(scope, variable, inside=inside):
            return True
    files = tuple(also)
    if (
        variable.owner is None
        and variable.function is None
        and _is_bounded_in_module(variable, files, inside=inside)
    ):
        return True
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
        elsewhere = (node for node in ast.walk(tree) if id(node) not in counted)
        if any(
            bounds(node, variable, inside=inside) and not _is_of(node, variable, ("self",))
            for node in elsewhere
        ):
            return True
        if any(bounds(node, variable, inside=inside) for other in others for node in ast.walk(other)):
            return True
        if any(_is_bounded_by_other_name(one, variable, inside=inside) for one in (tree, *others)):
            return True
        if any(_bounds_parts(other, variable, inside=inside) for other in others):
            return True
    if assigned > 1:
        return True
    calls = [node for node in nodes_of(scope_of(tree, variable), variable) if isinstance(node, ast.Call)]
    return any(_bounds_argument(call, variable, tree, files) for call in calls)


def _is_bounded_in_module(variable: Variable, files: Iterable[str], *, inside: bool) -> bool:
    """Whether other files bound a variable of a module as its attribute: `module.kept.clear()`."""
    others = other_sources_with(variable, files)
    if others is None:
        return True
    as_attribute = variable._replace(owner="")
    for tree in others:
        of_module = _names_of_module(tree, Path(variable.file).stem)
        if of_module and any(
            (bounds(node, as_attribute, inside=inside) or _sets_from_outside(node, as_attribute))
            and _is_of(node, variable, of_module)
            for node in ast.walk(tree)
        ):
            return True
    return False


def _names_of_module(tree: ast.Module, module: str) -> set[str]:
    """Return the names by which a source has imported a module."""
    return {
        one.asname or one.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for one in node.names
        if one.name.rpartition(".")[2] == module
    }


def is_set_by_place(variable: Variable, also: Iterable[str] = (), *, inside: bool = False) -> bool:
    """Whether code assigns places of a list, which makes it no longer, as the ring of a full buffer does.

    True if more files use it than are read. A constant place, such as the last one, is none of a ring.

    Args:
        also: other files, where an attribute may be used.
        inside: see `is_bounded`.
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
        and isinstance(node.value, ast.Subscript) is inside
        and _is_part_of(node.value, variable, inside=inside)
        and not _is_constant(node.slice)
        for nodes in (scopes, *map(ast.walk, others))
        for node in nodes
    )


def _is_constant(place: ast.expr) -> bool:
    return isinstance(place.operand if isinstance(place, ast.UnaryOp) else place, ast.Constant)


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


def _is_begun_anew(scope: ast.AST, variable: Variable) -> bool:
    """Whether a method that something calls again and again, to judge by its name, puts an empty container in place of an attribute."""
    first = first_assignments(scope, variable)
    return variable.owner is not None and any(
        isinstance(function, NAMED_FUNCTIONS)
        and REPEATED.search(function.name) is not None
        and isinstance(node, ast.Assign)
        and id(node) not in first
        and _is_empty(node.value)
        and any(is_variable(target, variable) for target in node.targets)
        for function in ast.walk(scope)
        for node in ast.walk(function)
    )


def _is_bounded_by_other_name(scope: ast.AST, variable: Variable, *, inside: bool = False) -> bool:
    """Whether a function gives the object another name, and bounds it by that: `items = self.items`."""
    for function in ast.walk(scope):
        if not isinstance(function, NAMED_FUNCTIONS):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Assign) or not _is_part_of(node.value, variable, inside=inside):
                continue
            for target in node.targets:
                if isinstance(target, ast.Name):
                    other = Variable(variable.file, target.id)
                    if any(bounds(one, other) for one in ast.walk(function)):
                        return True
    return False


def _is_of(node: ast.AST, variable: Variable, objects: Collection[str]) -> bool:
    """Whether a node uses an attribute of one of some objects, by their names."""
    return any(
        isinstance(one, ast.Attribute)
        and one.attr == variable.name
        and isinstance(one.value, ast.Name)
        and one.value.id in objects
        for one in ast.walk(node)
    )


def _bounds_parts(scope: ast.AST, variable: Variable, *, inside: bool) -> bool:
    """Whether code goes over several containers and bounds each, or puts an empty one in place of each.

    They are the parts of what the variable holds if the container in question is one of them; else those of `(self.kept, self.more)`.
    What `__init__` puts in their place is the first one.
    """
    for node in nodes_of(scope, variable):
        if isinstance(node, (ast.For, ast.AsyncFor)) and _goes_over(node.iter, variable, inside=inside):
            parts = {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
            if any(bounds(one, Variable(variable.file, name)) for name in parts for one in ast.walk(node)):
                return True
        if inside and isinstance(node, NAMED_FUNCTIONS) and node.name != "__init__":
            first = first_assignments(node, variable)
            if variable.owner is not None and any(
                isinstance(one, ast.Assign)
                and id(one) not in first
                and _is_empty(one.value)
                and any(
                    isinstance(target, ast.Subscript) and is_variable(target.value, variable)
                    for target in one.targets
                )
                for one in ast.walk(node)
            ):
                return True
    return False


def _goes_over(parts: ast.expr, variable: Variable, *, inside: bool) -> bool:
    if inside:
        return mentions(parts, variable)
    return isinstance(parts, (ast.Tuple, ast.List)) and any(is_variable(one, variable) for one in parts.elts)


def _is_empty(value: ast.expr) -> bool:
    """Whether a value is a new container, as `[]` or `deque()`."""
    if isinstance(value, ast.Call):
        return not value.args
    return isinstance(value, (ast.List, ast.Dict)) and not ast.unparse(value).strip("[]{}")


def _is_part_of(node: ast.expr, variable: Variable, *, inside: bool) -> bool:
    """Whether an expression is what a variable holds; if the container in question is inside it, one of its parts."""
    if not inside:
        return is_variable(node, variable)
    if (
        isinstance(node, ast.Call)
        and (method := called_method(node)) is not None
        and method.attr in LOOKING_UP
    ):
        return is_variable(method.value, variable)
    while isinstance(node, ast.Subscript):
        node = node.value
    return is_variable(node, variable)


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
                bounds(node, Variable(variable.file, name)) for node in ast.walk(function)
            ):
                return True
    return False


def bounds(node: ast.AST, variable: Variable, *, inside: bool = False) -> bool:
    """Whether a node removes, replaces or looks up what the variable holds, or compares how much it is.

    Args:
        inside: what is meant is a part of it. Looking up a part bounds the variable, and not the part.
    """

    def is_it(one: ast.expr) -> bool:
        return _is_part_of(one, variable, inside=inside)

    if isinstance(node, ast.Call):
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in REMOVING:
            # a queue gives what it removes, and is asked for no key
            looks_up = inside and function.attr in LOOKING_UP and is_variable(function.value, variable)
            return is_it(function.value) and not (looks_up and node.args)
        return last_name(function) in HEAPS and any(map(is_it, node.args))
    if isinstance(node, (ast.Delete, ast.Assign)):
        if isinstance(node, ast.Delete) and any(map(is_it, node.targets)):
            return True
        subscripts = [target for target in node.targets if isinstance(target, ast.Subscript)]
        return any(
            is_it(target.value)
            and (
                isinstance(node, ast.Delete)
                or (isinstance(target.slice, (ast.Slice, ast.BinOp)) and not inside)
                or _is_part(node.value)
            )
            for target in subscripts
        )
    if isinstance(node, ast.Compare):
        parts = [node.left, *node.comparators]
        if any(isinstance(operator, (ast.In, ast.NotIn)) for operator in node.ops):
            return not inside and any(map(is_it, parts[1:]))
        return any(
            isinstance(part, ast.Call) and last_name(part.func) == "len" and any(map(is_it, part.args))
            for part in parts
        )
    return False


def _is_part(value: ast.expr) -> bool:
    """Whether a value is a slice, as in `kept["last"] = (kept["last"] + [new])[-8:]`."""
    return isinstance(value, ast.Subscript) and isinstance(value.slice, ast.Slice)
