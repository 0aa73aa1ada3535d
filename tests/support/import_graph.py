"""Read the imports between our folders from the sources, and draw them in docs/internals/architecture.md.

Used by the tests of the documentation and by `make generated`. Runs no code of the project.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from support.imports import FILES, PACKAGES, REPOSITORY, edges, facts

PAGE = REPOSITORY / "docs" / "internals" / "architecture.md"
Graph = Mapping[str, set[str]]


@functools.cache
def folders() -> list[Path]:
    """Every folder of the packages that holds Python files, the packages first."""
    found = {
        path.parent.relative_to(REPOSITORY)
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
    }
    return sorted(found, key=lambda folder: (PACKAGES.index(folder.parts[0]), folder.parts))


def imported_files(name: str) -> set[Path]:
    """Return the files that a module of ours imports, relative to the repository."""
    return {FILES[imported].relative_to(REPOSITORY) for imported in edges(name)}


def graph_of(hall: str) -> Graph:
    """Return which folders and modules that lie directly in a folder import which others there."""
    found: dict[str, set[str]] = defaultdict(set)
    for name in _modules_of(hall):
        here = _node(FILES[name].relative_to(REPOSITORY / hall))
        found[here] |= {
            _node(file.relative_to(hall)) for file in imported_files(name) if file.is_relative_to(hall)
        } - {here}
    return found


def package_graph() -> Graph:
    """Return which packages import which others."""
    return {
        package: {file.parts[0] for name in _modules_of(package) for file in imported_files(name)} - {package}
        for package in PACKAGES
    }


def halls() -> list[str]:
    """Return the folders that hold several folders of modules, the packages first."""
    return [str(folder) for folder in folders() if sum(other.parent == folder for other in folders()) > 1]


def _modules_of(folder: str) -> list[str]:
    return [name for name, file in FILES.items() if file.is_relative_to(REPOSITORY / folder)]


def _node(path: Path) -> str:
    return path.parts[0]


def reduced(graph: Graph) -> dict[str, set[str]]:
    """Return the graph without edges that a longer path implies.

    Raises:
        ValueError: the graph has a cycle, so it has no unique reduction.
    """

    def reachable(start: str, path: tuple[str, ...]) -> set[str]:
        found: set[str] = set()
        for target in graph.get(start, set()):
            if target in path:
                raise ValueError(f"import circle: {' -> '.join((*path, target))}")
            found |= {target} | reachable(target, (*path, target))
        return found

    below = {node: reachable(node, (node,)) for node in graph}
    return {
        node: {
            target
            for target in targets
            if not any(target in below.get(other, set()) for other in targets - {target})
        }
        for node, targets in graph.items()
    }


def mermaid(graph: Graph) -> str:
    """Return a Mermaid flowchart of a graph without cycles; implied edges are omitted."""
    lines = ["```mermaid", "flowchart TB"]
    for node, targets in sorted(reduced(graph).items()):
        if not targets and node not in set().union(*graph.values()):
            lines.append(f"    {_identifier(node)}[{node}]")
        lines += [
            f"    {_identifier(node)}[{node}] --> {_identifier(target)}[{target}]"
            for target in sorted(targets)
        ]
    return "\n".join([*lines, "```"])


def _identifier(node: str) -> str:
    return re.sub(r"\W", "_", node)


def folder_table() -> str:
    """Return one table row per folder: number of files, and first paragraph of its docstring."""
    rows = ["| folder | files | what it holds |", "|---|---|---|"]
    for folder in folders():
        files = [path for path in (REPOSITORY / folder).glob("*.py") if path.name != "__init__.py"]
        docstring = facts(REPOSITORY / folder / "__init__.py").docstrings[0]
        assert docstring, f"{folder}/__init__.py has no docstring"
        rows.append(f"| `{folder}/` | {len(files)} | {' '.join(docstring.split(chr(10) * 2)[0].split())} |")
    return "\n".join(rows)


def feature_table() -> str:
    """Return one table row per feature: its size, that of its tests, and where else it is named."""
    rows = ["| feature | files | lines | lines of tests | named in other modules |", "|---|---|---|---|---|"]
    room = REPOSITORY / "runtime" / "features"
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(FILES.values())}
    for folder in sorted(path for path in room.iterdir() if (path / "__init__.py").is_file()):
        own = sorted(folder.rglob("*.py"))
        tests = [
            *(REPOSITORY / "tests/unit/runtime/features" / folder.name).rglob("*.py"),
            *(REPOSITORY / "tests/fault").glob(f"test_{folder.name}.py"),
        ]
        others = [
            f"`{file.relative_to(REPOSITORY)}`"
            for file, text in texts.items()
            if file not in own and folder.name in text
        ]
        rows.append(f"| {folder.name} | {len(own)} | {_lines(own)} | {_lines(tests)} | {', '.join(others)} |")
    return "\n".join(rows)


def _lines(files: list[Path]) -> int:
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def drawings() -> str:
    """Return the graph of the packages, and one for each folder with several folders."""
    parts = ["### Packages", mermaid(package_graph())]
    for hall in halls():
        parts += [f"### Inside `{hall}/`", mermaid(graph_of(hall))]
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with its generated sections updated."""
    sections = {"folders": folder_table(), "features": feature_table(), "imports": drawings()}
    for name, content in sections.items():
        begin, end = f"<!-- generated: {name} -->", f"<!-- end: {name} -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        assert found, f"{PAGE.name} lacks {begin}"
        assert closed, f"{PAGE.name} lacks {end}"
        text = f"{before}{begin}\n\n{content}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(PAGE)
