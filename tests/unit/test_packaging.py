"""What is installed is what lies on disk."""

from __future__ import annotations

import re
import runpy
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from trove_classifiers import classifiers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("cli", "dashboards", "runtime", "trainers", "watchdog")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    """The parsed pyproject.toml."""
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def packages_on_disk() -> set[str]:
    """Every folder with an `__init__.py` below ours, as a dotted name."""
    return {
        "grpo_run." + ".".join(file.parent.relative_to(REPOSITORY).parts)
        for folder in FOLDERS
        for file in (REPOSITORY / folder).rglob("__init__.py")
    }


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """What `setup.py` gives to setuptools."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        patch.setattr("setuptools.setup", lambda **arguments: found.update(arguments))
        runpy.run_path("setup.py")
    return found


def test_every_package_on_disk_is_found(given: dict[str, Any]) -> None:
    """`setup.py` finds the packages; one that it missed would be missing from the wheel."""
    assert sorted(given["packages"]) == sorted({"grpo_run"} | packages_on_disk())


def test_a_package_index_shows_no_link_that_leads_nowhere(given: dict[str, Any]) -> None:
    """It has the README, and not the files beside it."""
    links = re.findall(r"\]\(([^)]*)\)", given["long_description"])
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_classifiers_are_known(project: dict[str, Any]) -> None:
    """A package index refuses others."""
    assert set(project["project"]["classifiers"]) <= classifiers


def test_the_five_folders_are_packages() -> None:
    """The design's folders are all there."""
    assert {f"grpo_run.{folder}" for folder in FOLDERS} <= packages_on_disk()


def test_every_folder_with_sources_is_a_package() -> None:
    """A Python file in a folder without `__init__.py` would not be installed."""
    lone = {
        file.parent
        for folder in FOLDERS
        for file in (REPOSITORY / folder).rglob("*.py")
        if not (file.parent / "__init__.py").is_file()
    }
    assert lone == set()


def test_package_directories_map_to_their_folders(project: dict[str, Any]) -> None:
    """`grpo_run.a` comes from the folder `a`; setuptools derives the folders below it."""
    assert project["tool"]["setuptools"]["package-dir"] == {
        f"grpo_run.{folder}": folder for folder in FOLDERS
    }


def test_every_package_is_marked_as_typed() -> None:
    """Type checkers of users read our annotations only if the top-level package has `py.typed`."""
    assert [folder for folder in FOLDERS if not (REPOSITORY / folder / "py.typed").is_file()] == []


def test_every_data_file_is_installed(project: dict[str, Any]) -> None:
    """Every file in a package that is not a Python module matches a pattern of the package data."""
    setuptools = project["tool"]["setuptools"]
    patterns = setuptools["package-data"]["*"]
    missing = [
        file.relative_to(REPOSITORY)
        for folder in FOLDERS
        for file in (REPOSITORY / folder).rglob("*")
        if file.is_file()
        and "__pycache__" not in file.parts
        and file.suffix != ".py"
        and not any(file.match(pattern) for pattern in patterns)
    ]
    assert missing == []


def test_what_is_imported_is_this_checkout() -> None:
    """The installed package is the one under test, not an older wheel."""
    for folder in FOLDERS:
        assert Path(str(files(f"grpo_run.{folder}"))).resolve() == (REPOSITORY / folder).resolve()


def test_the_command_is_installed(project: dict[str, Any]) -> None:
    """`grpo-run` calls a function that exists."""
    from importlib import import_module

    module, _, function = project["project"]["scripts"]["grpo-run"].partition(":")
    assert callable(getattr(import_module(module), function))
