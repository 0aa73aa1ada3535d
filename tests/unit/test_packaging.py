"""What is installed; that the wheel has every file on disk is in `integration/test_wheel.py`."""

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


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """What `setup.py` gives to setuptools."""
    found: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(REPOSITORY)
        patch.setattr("setuptools.setup", lambda **arguments: found.update(arguments))
        runpy.run_path("setup.py")
    return found


def test_a_package_index_shows_no_link_that_leads_nowhere(given: dict[str, Any]) -> None:
    """It has the README, and not the files beside it."""
    links = re.findall(r"\]\(([^)]*)\)", given["long_description"])
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_classifiers_are_known(project: dict[str, Any]) -> None:
    """A package index refuses others."""
    assert set(project["project"]["classifiers"]) <= classifiers


def test_every_package_is_marked_as_typed() -> None:
    """Type checkers of users read our annotations only if the top-level package has `py.typed`."""
    assert [folder for folder in FOLDERS if not (REPOSITORY / folder / "py.typed").is_file()] == []


def test_what_is_imported_is_this_checkout() -> None:
    """The installed package is the one under test, not an older wheel."""
    for folder in FOLDERS:
        assert Path(str(files(f"grpo_run.{folder}"))).resolve() == (REPOSITORY / folder).resolve()


def test_the_command_is_installed(project: dict[str, Any]) -> None:
    """`grpo-run` calls a function that exists."""
    from importlib import import_module

    module, _, function = project["project"]["scripts"]["grpo-run"].partition(":")
    assert callable(getattr(import_module(module), function))
