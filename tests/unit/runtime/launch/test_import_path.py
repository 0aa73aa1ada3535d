"""Directories that a script puts in front of its import path are found by syntax, and imports are followed into them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_run.runtime.launch.sources import directories_added, local_modules, parsed

HERE = Path("/code/scripts/train.py")
WAYS = {
    'sys.path.insert(0, "/lib")': "/lib",
    'sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))': "/code/scripts",
    'sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "lib"))': "/code/scripts/../lib",
    "sys.path.insert(0, os.path.join(dirname(__file__), os.pardir))": "/code/scripts/..",
    "sys.path.insert(1, str(Path(__file__).parent.parent))": "/code",
    "sys.path.insert(0, str(Path(__file__).resolve().parents[1] / 'lib'))": "/code/lib",
    "sys.path.insert(0, Path(__file__).parent.joinpath('lib').as_posix())": "/code/scripts/lib",
    'ROOT = Path(__file__).parent\nsys.path.insert(0, f"{ROOT}/lib")': "/code/scripts/lib",
    'sys.path[:0] = ["/lib"]': "/lib",
    'sys.path = ["/lib"] + sys.path': "/lib",
    'sys.path = ["/lib", *sys.path]': "/lib",
    'sys.path.insert(0, os.path.dirname(__file__) + "/lib")': "/code/scripts/lib",
}  # fmt: skip


@pytest.mark.parametrize("source", sorted(WAYS))
def test_every_usual_way_is_found(source: str) -> None:
    """As scripts write it."""
    assert directories_added(parsed(source), HERE) == [WAYS[source]]


@pytest.mark.parametrize(
    "source",
    ["sys.path.append('/lib')", "path.insert(0, '/lib')", "sys.path.insert(0, where())", "sys.path.insert(0, sys.argv[1])",
     "x = x\nsys.path.insert(0, x)", "sys.path.insert(0, 1 / 0)", "def ("],
)  # fmt: skip
def test_what_cannot_be_known_is_not_guessed(source: str) -> None:
    """The rank compares the real path later."""
    assert directories_added(parsed(source), HERE) == []


def test_imports_are_followed_into_an_added_directory_and_relative_to_a_module(tmp_path: Path) -> None:
    """Also packages on the way, and the working directory with `-m`."""
    for path, text in {
        "scripts/train.py": "import sys\nsys.path.insert(0, str(Path(__file__).parent.parent / 'lib'))\nimport a.b.c\n",
        "lib/a/__init__.py": "",
        "lib/a/b/__init__.py": "",
        "lib/a/b/c.py": "from .. import d\nfrom . import e\n",
        "lib/a/d.py": "",
        "lib/a/b/e.py": "",
        "pkg/__init__.py": "",
        "pkg/train.py": "from . import rewards\nimport pkg.data\n",
        "pkg/rewards.py": "",
        "pkg/data.py": "",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def followed(*arguments: Path) -> set[str]:
        return {os.path.relpath(source.path, tmp_path) for source in local_modules(*arguments)}

    assert followed(tmp_path / "scripts" / "train.py") == {
        "scripts/train.py", "lib/a/__init__.py", "lib/a/b/__init__.py", "lib/a/b/c.py", "lib/a/d.py", "lib/a/b/e.py",
    }  # fmt: skip
    assert followed(tmp_path / "pkg" / "train.py", tmp_path) == {
        "pkg/train.py", "pkg/rewards.py", "pkg/data.py", "pkg/__init__.py",
    }  # fmt: skip
