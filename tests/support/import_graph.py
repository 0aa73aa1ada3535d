"""Read the imports between our folders from the sources, and draw them in docs/architecture.md.

Used by the tests of the documentation and by `make generated`. Runs no code of the project.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "architecture.md"
PACKAGES = ("cli", "dashboards", "trainers", "runtime", "watchdog")
"""From the top layer down."""
Graph = Mapping[str, set[str]]


def folders() -> list[Path]:
    """Every folder of the packages that holds Python files, the packages first."""
    found = {
        path.parent.relative_to(REPOSITORY)
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*.py")
    }
    return sorted(found, key=lambda folder: (PACKAGES.index(folder.parts[0]), folder.parts))


def imported_files(path: Path) -> set[Path]:
    """Our files that `path` imports, inside functions too; relative to the repository."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names] + [node.module]
        else:
            continue
        for name in names:
            if name.startswith("grpo_run."):
                module = Path(*name.split(".")[1:])
                for candidate in (module.with_suffix(".py"), module / "__init__.py"):
                    if (REPOSITORY / candidate).is_file():
                        found.add(candidate)
    # `from package import module` also names the package; only its own names count as an import of it
    return {file for file in found if file.name != "__init__.py" or not _has_submodule(found, file)}


def _has_submodule(found: set[Path], package: Path) -> bool:
    return any(file.parent == package.parent and file != package for file in found)


def folder_graph(package: str) -> Graph:
    """Return which folders of a package import which others; files at its root count separately."""
    edges: dict[str, set[str]] = defaultdict(set)
    root = REPOSITORY / package
    for path in sorted(root.rglob("*.py")):
        here = _node(path.relative_to(root))
        edges[here] |= {
            _node(file.relative_to(package)) for file in imported_files(path) if file.parts[0] == package
        } - {here}
    return edges


def package_graph() -> Graph:
    """Return which packages import which others."""
    return {
        package: {
            file.parts[0] for path in (REPOSITORY / package).rglob("*.py") for file in imported_files(path)
        }
        - {package}
        for package in PACKAGES
    }


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
        docstring = ast.get_docstring(
            ast.parse((REPOSITORY / folder / "__init__.py").read_text(encoding="utf-8"))
        )
        assert docstring, f"{folder}/__init__.py has no docstring"
        rows.append(f"| `{folder}/` | {len(files)} | {' '.join(docstring.split(chr(10) * 2)[0].split())} |")
    return "\n".join(rows)


def drawings() -> str:
    """Return the graph of the packages, and one for each package with several folders."""
    parts = ["### Packages", mermaid(package_graph())]
    for package in PACKAGES:
        graph = folder_graph(package)
        if sum(1 for node in graph if not node.endswith(".py")) > 1:
            parts += [f"### Inside `{package}/`", mermaid(graph)]
    return "\n\n".join(parts)


def page(text: str) -> str:
    """Return the page with its generated sections updated."""
    for name, content in (("folders", folder_table()), ("imports", drawings())):
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
