"""The script and the modules beside it that it imports, each read and parsed once.

Called by `cli.launch_options`. A module that is imported under a computed name is not found.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launch.sources.import_path import directories_added
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


def local_modules(script: Path, first_entry: Path | None = None) -> list[Source]:
    """Return the script and the modules beside it that it imports, directly or through one another.

    Args:
        script: the file that will run.
        first_entry: the directory that Python puts first on `sys.path`; the script's if None. Directories that a source
            adds to the path are followed too.

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
    roots = [(first_entry or path.parent).resolve()]
    for source in found:
        roots += [Path(entry).resolve() for entry in directories_added(source.nodes, source.path)]
        for candidate in _candidates(source, roots, path.parent):
            if candidate in seen or len(found) > MAX_MODULES:
                continue
            seen.add(candidate)
            read = read_file(candidate)
            if read is not None:
                found.append(_source(candidate, read))
    return found


def imported_names(nodes: Sequence[ast.AST]) -> set[tuple[int, str]]:
    """Return the dotted names that a source imports, with the number of leading dots.

    For `from a import b`, both `a` and `a.b`; for `import a.b`, both too, because Python imports the packages first.
    """
    found: set[tuple[int, str]] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(0, name) for alias in node.names for name in _with_packages(alias.name)}
        elif isinstance(node, ast.ImportFrom):
            package = [node.module] if node.module else []
            names = [".".join([*package, alias.name]) for alias in node.names]
            found |= {(node.level, name) for full in names for name in _with_packages(full)}
    return {(level, name) for level, name in found if all(part.isidentifier() for part in name.split("."))}


def _with_packages(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]


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


def _candidates(source: Source, roots: Sequence[Path], beside: Path) -> list[Path]:
    """The files that may hold what a source imports: below a root, or relative to the source within the script's files."""
    found = []
    for level, name in sorted(imported_names(source.nodes)):
        starts = list(roots)
        if level:
            start = source.path.parents[min(level, len(source.path.parents)) - 1]
            starts = [start] if any(start.is_relative_to(root) for root in (*roots, beside)) else []
        for start in starts:
            folder = start.joinpath(*name.split("."))
            found += [folder.with_suffix(".py"), folder / "__init__.py"]
    return found
