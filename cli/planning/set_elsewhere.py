"""What a script decides where its configuration and trainer are not written out: by other names, in subclasses, on the model. Used by `script.py`.

Nothing of it is followed. It is named, so that a prediction that leaves it out says so.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping

from grpo_run.runtime.launch.sources import last_name

NAMES_OF_ARGUMENTS = frozenset({"args", "training_args"})
"""Attributes by which trainers and scripts have a configuration: `trainer.args`."""
LOSSES = ("compute_loss", "_compute_loss", "training_step", "create_optimizer")
"""Methods of a trainer whose memory is predicted."""
NEW_FIELD = "field"


def set_by_other_names(tree: ast.Module, names: Collection[str]) -> Iterator[str]:
    """Yield attributes of a configuration that are set through another name, by `setattr`, or in a copy.

    Args:
        names: that the configuration has where it is built.
    """
    others = set(_other_names(tree, names))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Attribute) and _is_configuration(target.value, others):
                    yield target.attr
        elif isinstance(node, ast.Call):
            called = last_name(node.func)
            first = node.args[0] if node.args else None
            if first is None or not _is_configuration(first, {*names, *others}):
                continue
            if called == "setattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
                yield str(node.args[1].value)
            elif called == "replace":
                yield from (one.arg for one in node.keywords if one.arg is not None)


def sets_computed_names(tree: ast.Module, names: Collection[str]) -> bool:
    """Whether `setattr` sets attributes of a configuration whose names are computed."""
    return any(
        isinstance(node, ast.Call)
        and last_name(node.func) == "setattr"
        and len(node.args) > 1
        and _is_configuration(node.args[0], {*names, *_other_names(tree, names)})
        and not isinstance(node.args[1], ast.Constant)
        for node in ast.walk(tree)
    )


def defaults_of(tree: ast.Module, kind: str, below: Collection[str] = ()) -> dict[str, ast.expr]:
    """Return the defaults that a class of the script gives to fields, with those of the classes that it inherits from.

    Args:
        below: classes that inherit from it.
    """
    found: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == kind:
            for base in reversed(node.bases):
                if last_name(base) not in (kind, *below):
                    found.update(defaults_of(tree, last_name(base), (kind, *below)))
            for statement in node.body:
                if isinstance(statement, ast.AnnAssign) and statement.value is not None:
                    found[last_name(statement.target)] = _default(statement.value)
                elif isinstance(statement, ast.Assign):
                    found.update({last_name(target): statement.value for target in statement.targets})
    return found


def decided_elsewhere(tree: ast.Module, trainers: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each thing that changes what a trainer keeps, and is not followed.

    Args:
        trainers: names of the script's own classes with that of the trainer that they inherit from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in trainers:
            own = [one.name for one in node.body if isinstance(one, ast.FunctionDef) and one.name in LOSSES]
            if own:
                yield f"{node.name} has its own {', '.join(own)}, which is not followed: {trainers[node.name]}'s is traced."
    if any(_freezes(node) for node in ast.walk(tree)):
        yield "The script sets requires_grad, which is not followed: all weights are taken to be trained, or all adapters."


def _freezes(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign):
        return any(isinstance(one, ast.Attribute) and one.attr == "requires_grad" for one in node.targets)
    return isinstance(node, ast.Call) and last_name(node.func) == "requires_grad_"


def _other_names(tree: ast.Module, names: Collection[str]) -> Iterator[str]:
    """Yield other names of the objects that some names stand for: of assignments, and of arguments that functions are given."""
    functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and getattr(node.value, "id", "") in names:
            yield from (one.id for one in node.targets if isinstance(one, ast.Name) and one.id not in names)
        elif isinstance(node, ast.Call) and (function := functions.get(last_name(node.func))) is not None:
            given = [*function.args.posonlyargs, *function.args.args]
            yield from (
                one.arg
                for one, value in zip(given, node.args, strict=False)
                if getattr(value, "id", "") in names and one.arg not in names
            )
            yield from (
                one.arg
                for one in node.keywords
                if one.arg is not None and getattr(one.value, "id", "") in names and one.arg not in names
            )


def _is_configuration(node: ast.expr, names: Collection[str]) -> bool:
    if isinstance(node, ast.Call):
        return last_name(node.func).endswith("Config")
    return getattr(node, "id", "") in names or (
        isinstance(node, ast.Attribute) and node.attr in NAMES_OF_ARGUMENTS
    )


def _default(value: ast.expr) -> ast.expr:
    """Return the default of `field(default=...)`; the call itself if it makes its value by a function."""
    if isinstance(value, ast.Call) and last_name(value.func) == NEW_FIELD:
        return next((one.value for one in value.keywords if one.arg == "default"), value)
    return value
