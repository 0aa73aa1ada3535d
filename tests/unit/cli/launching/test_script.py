"""Finding the script: by its path, or by the name of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.cli.launching.command import source_of
from grpo_run.runtime.errors import UsageError


def test_a_script_is_its_own_source(tmp_path: Path) -> None:
    """The path is returned as given."""
    script = tmp_path / "train.py"
    script.write_text("")
    assert source_of(str(script), module=False) == script


def test_a_module_in_the_working_directory_is_found(here: Path) -> None:
    """`python -m` finds it too."""
    (here / "my_training.py").write_text("")
    assert source_of("my_training", module=True).resolve() == here / "my_training.py"


def test_a_package_is_run_by_its_main_module(here: Path) -> None:
    """As by `python -m package`; a module in a package is found too."""
    (here / "my_package").mkdir()
    for name in ("__init__", "__main__", "grpo"):
        (here / "my_package" / f"{name}.py").write_text("")
    assert source_of("my_package", module=True).name == "__main__.py"
    assert source_of("my_package.grpo", module=True).name == "grpo.py"


def test_finding_a_module_does_not_import_it(here: Path) -> None:
    """The user's package must not run in the launcher."""
    (here / "my_package").mkdir()
    (here / "my_package" / "__init__.py").write_text("raise RuntimeError('imported')")
    (here / "my_package" / "grpo.py").write_text("")
    assert source_of("my_package.grpo", module=True).name == "grpo.py"


@pytest.mark.parametrize(
    "target", ["no_such_module", "my_package", "my_package.absent", "plain.inner", "", ".x"]
)
def test_a_missing_module_is_refused_in_one_line(here: Path, target: str) -> None:
    """Missing, without `__main__`, or inside a module that is not a package."""
    (here / "my_package").mkdir()
    (here / "my_package" / "__init__.py").write_text("")
    (here / "plain.py").write_text("")
    with pytest.raises(UsageError, match="cannot be found"):
        source_of(target, module=True)


def test_a_plain_folder_does_not_hide_an_installed_module(here: Path) -> None:
    """A folder of data with the name of a library is not a package."""
    (here / "json").mkdir()
    assert source_of("json.tool", module=True).name == "tool.py"
