"""The imports of our modules, read from the sources; no module is executed.

Used by the test of the import order and by `import_graph.py`, which draws them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("cli", "dashboards", "trainers", "runtime", "watchdog")
"""From the top layer down."""


def sources() -> Iterator[tuple[str, Path]]:
    """Yield every module of ours: dotted name without `grpo_run.`, and its file."""
    for folder in PACKAGES:
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


FILES = dict(sources())


def nodes(tree: ast.AST, *, module_level: bool) -> Iterator[ast.AST]:
    """Yield all nodes, or only those executed on import (without function bodies and type-checking
    blocks).
    """
    for child in ast.iter_child_nodes(tree):
        if module_level and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if module_level and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from nodes(child, module_level=module_level)


@functools.cache
def imports(name: str, *, module_level: bool = False) -> frozenset[str]:
    """Return the dotted names that a module of ours imports; for `from a import b`, both `a` and `a.b`."""
    path = FILES[name]
    package = ["grpo_run", *name.split(".")]
    if path.name != "__init__.py":
        package.pop()
    found: set[str] = set()
    for node in nodes(ast.parse(path.read_text(encoding="utf-8")), module_level=module_level):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""]).strip(".")
            module = base if node.level else (node.module or "")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def edges(name: str) -> set[str]:
    """Return the modules of ours that a module imports, also inside functions.

    A package's `__init__` is included only if it is named.
    """
    found = set()
    for word in imports(name):
        inner = word.removeprefix("grpo_run.")
        if word.startswith("grpo_run.") and inner in FILES and inner != name:
            found.add(inner)
    # `from package import module` names both; only the module is meant
    return {module for module in found if not any(other.startswith(f"{module}.") for other in found)}


def room(name: str) -> str:
    """Return the room of a module: its folder, or the module itself if it lies beside folders."""
    folder = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    return name if folder in halls() else folder


@functools.cache
def halls() -> frozenset[str]:
    """Return the folders that hold folders of modules."""
    return frozenset(
        name.rpartition(".")[0] for name, file in FILES.items() if file.name == "__init__.py" and "." in name
    )
