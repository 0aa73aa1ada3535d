"""The imports of our modules, read from the sources; no module is executed.

Used by the test of the import order and by `import_graph.py`, which draws them.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
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


def nodes(of: ast.AST, *, module_level: bool) -> Iterator[ast.AST]:
    """Yield all statements, or only those executed on import (without function bodies and type-checking
    blocks).
    """
    waiting = [of]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.expr):
                continue
            if module_level and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if module_level and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue
            yield child
            waiting.append(child)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the checks read of a source. Trees are not kept: each garbage collection would visit them."""

    imports: frozenset[str]
    imports_at_module_level: frozenset[str]
    docstrings: tuple[str, ...]


@functools.cache
def facts(path: Path) -> Facts:
    """Parse a source once for all checks."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documented = [node for node in nodes(tree, module_level=False) if isinstance(node, kinds)]
    return Facts(
        imports=_imports(path, nodes(tree, module_level=False)),
        imports_at_module_level=_imports(path, nodes(tree, module_level=True)),
        docstrings=tuple(ast.get_docstring(node) or "" for node in (tree, *documented)),
    )


def imports(name: str, *, module_level: bool = False) -> frozenset[str]:
    """Return the dotted names that a module of ours imports; for `from a import b`, both `a` and `a.b`."""
    found = facts(FILES[name])
    return found.imports_at_module_level if module_level else found.imports


def _imports(path: Path, statements: Iterator[ast.AST]) -> frozenset[str]:
    package = ["grpo_run", *path.relative_to(REPOSITORY).parent.parts]
    found: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""]).strip(".")
            module = base if node.level else (node.module or "")
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


@functools.cache
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
