"""Private names of torch and of the libraries above it are used in `runtime/upstream/` only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
LIBRARIES = frozenset({"torch", "transformers", "trl", "accelerate", "deepspeed"})
FOLDERS = ("runtime", "trainers", "watchdog", "dashboards", "cli")


def is_private(name: str) -> bool:
    """Whether a part of a dotted name is private; names such as `__version__` are not."""
    return any(part.startswith("_") and not part.endswith("__") for part in name.split("."))


def private_names(source: str) -> Iterator[str]:
    """Yield the private modules and names that a source imports from the libraries, and attributes of their
    modules.
    """
    bound: dict[str, str] = {}
    if not any(name in source for name in LIBRARIES):
        return
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in LIBRARIES:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    bound[alias.asname or name] = name
                    yield from [alias.name] * is_private(alias.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in LIBRARIES:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                bound[alias.asname or alias.name] = name
                yield from [name] * is_private(name)
    for node in nodes:
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in bound and is_private(".".join(parts)):
            yield ".".join([bound[node.id], *parts])


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch\ntorch._C.f()", {"torch._C", "torch._C.f"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("import torch.distributed as d\nd.c._x = 1", {"torch.distributed.c._x"}),
        ("from torch.distributed import run\nrun._f()", {"torch.distributed.run._f"}),
        ("from trl.trainer import _utils", {"trl.trainer._utils"}),
        ("import torch\ntorch.__version__\nself._x\nother.torch._x", set()),
    ],
)
def test_what_counts_as_a_private_name(source: str, found: set[str]) -> None:
    """An import, or an attribute of an imported module or class."""
    assert set(private_names(source)) == found


def test_private_names_are_in_one_place() -> None:
    """Whoever changes the version of a library finds there what may break."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    elsewhere = [file for file in files if not file.is_relative_to(ROOT / "runtime" / "upstream")]
    assert len(elsewhere) > 300
    found = {
        f"{file.relative_to(ROOT)}: {name}" for file in elsewhere for name in private_names(file.read_text())
    }
    assert found == set()
