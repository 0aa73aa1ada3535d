"""A name leads elsewhere under an import path exactly if Python would import another file."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from grpo_run.runtime.launch.resolution import Place, place_of, read_at_import, resolves_elsewhere

NAMES = ("lib", "other", "missing", "spread")


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A directory with a package, a module, and a package without `__init__.py`."""
    (tmp_path / "base" / "lib").mkdir(parents=True)
    (tmp_path / "base" / "lib" / "__init__.py").write_text("")
    (tmp_path / "base" / "other.py").write_text("")
    (tmp_path / "base" / "spread").mkdir()
    return str(tmp_path / "base")


def elsewhere(path: Sequence[str], before: Sequence[str]) -> dict[str, Place]:
    """The names that lead elsewhere."""
    places = {name: place_of(PathFinder.find_spec(name, list(before))) for name in NAMES}
    return dict(resolves_elsewhere(places, path, before))


def folder(tmp_path: Path, *files: str) -> str:
    """A directory with these files."""
    for file in files:
        (tmp_path / "new" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "new" / file).write_text("")
    return str(tmp_path / "new")


@pytest.mark.parametrize(
    "file", ["lib.py", "lib/__init__.py", "other.cpython-311-x86_64-linux-gnu.so", "missing.py", "missing/x"]
)
def test_a_new_first_directory_with_the_name_changes_it(tmp_path: Path, base: str, file: str) -> None:
    """A module, a package, an extension, and a name that was not found before, even as a plain folder."""
    if ".so" in file:
        from importlib.machinery import EXTENSION_SUFFIXES

        file = "other" + EXTENSION_SUFFIXES[0]
    new = folder(tmp_path, file)
    assert list(elsewhere([new, base], [base])) == [file.partition("/")[0].partition(".")[0]]


@pytest.mark.parametrize("file", ["lib/x.txt", "unrelated.py", "lib.txt", "other/data.json"])
def test_what_python_does_not_import_changes_nothing(tmp_path: Path, base: str, file: str) -> None:
    """A plain folder does not hide a package or a module."""
    assert elsewhere([folder(tmp_path, file), base], [base]) == {}


def test_a_directory_at_the_end_changes_only_what_was_missing(tmp_path: Path, base: str) -> None:
    """As with `sys.path.append`."""
    new = folder(tmp_path, "lib.py", "missing.py")
    assert list(elsewhere([base, new], [base])) == ["missing"]


def test_another_order_of_known_directories_is_seen(tmp_path: Path, base: str) -> None:
    """The script may lie in a directory that PYTHONPATH names second."""
    new = folder(tmp_path, "lib.py")
    assert list(elsewhere([new, base, new], [base, new])) == ["lib"]
    assert elsewhere([base, new, base], [base, new]) == {}


def test_a_further_part_of_a_spread_package_changes_it(tmp_path: Path, base: str) -> None:
    """A package without `__init__.py` is the union of its folders."""
    assert list(elsewhere([folder(tmp_path, "spread/x.py"), base], [base])) == ["spread"]


def test_a_directory_that_is_missing_or_cannot_be_listed_is_asked_about_by_name(
    tmp_path: Path, base: str
) -> None:
    """A zip file is an entry too."""
    assert elsewhere([str(tmp_path / "nowhere"), base], [base]) == {}
    with zipfile.ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("lib/__init__.py", "")
    assert list(elsewhere([str(tmp_path / "code.zip"), base], [base])) == ["lib"]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("HF_HOME", True),
        ("TRANSFORMERS_OFFLINE", True),
        ("OMP_NUM_THREADS", True),
        ("CUDA_VISIBLE_DEVICES", True),
        ("PYTORCH_CUDA_ALLOC_CONF", True),
        ("WANDB_PROJECT", False),
        ("TOKENIZERS_PARALLELISM", False),
        ("HF_HUB_ENABLE_HF_TRANSFER", False),
        ("HF_XET_HIGH_PERFORMANCE", False),
        ("PYTHONPATH", False),
    ],
)
def test_variables_that_libraries_read_at_import(name: str, read: bool) -> None:
    """A script that sets one needs a fresh interpreter; for another one it would cost seconds at every
    restart.
    """
    assert read_at_import(name) is read
