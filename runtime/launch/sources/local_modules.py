"""The script and the modules beside it that it imports, each read and parsed once.

Called by `cli.launch_options`. A module that is imported under a computed name is not found.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.sources.syntax import parsed

MAX_FILE_BYTES = 16 << 20
"""Larger files are data, not code or configuration, and are not read."""
MAX_MODULES = 500
"""Local modules that are followed from the script."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A file of the script or of one of its modules: where it is, its bytes, and the nodes of its syntax tree."""

    path: Path
    content: bytes
    nodes: Sequence[ast.AST] = field(repr=False)


def local_modules(script: Path) -> list[Source]:
    """Return the script and the modules beside it that it imports, directly or through one another.

    Raises:
        UsageError: the script cannot be read.
    """
    path = script.resolve()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UsageError(f"script {script} cannot be read: {error.strerror}") from error
    found = [_source(path, content)]
    seen = {path}
    for source in found:
        for candidate in _candidates(path.parent, imported_names(source.nodes)):
            if candidate in seen or len(found) > MAX_MODULES:
                continue
            seen.add(candidate)
            read = read_file(candidate)
            if read is not None:
                found.append(_source(candidate, read))
    return found


def imported_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the dotted names that a source imports; for `from a import b`, both `a` and `a.b`."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if all(part.isidentifier() for part in name.split("."))}


def read_file(path: Path) -> bytes | None:
    """Return the content of a regular file of moderate size, or None."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        return path.read_bytes()
    except OSError:
        return None


def _source(path: Path, content: bytes) -> Source:
    return Source(path=path, content=content, nodes=parsed(content.decode(errors="replace")))


def _candidates(root: Path, names: set[str]) -> list[Path]:
    """The files that may hold the modules of these names."""
    folders = [root.joinpath(*name.split(".")) for name in sorted(names)]
    return [path for folder in folders for path in (folder.with_suffix(".py"), folder / "__init__.py")]
