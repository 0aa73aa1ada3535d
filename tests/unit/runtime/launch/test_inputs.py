"""What a run depends on is recorded and compared: scripts, modules, files, variables, settings and versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.launch.inputs import (
    Inputs,
    changes_of_training,
    changes_of_versions,
    collect,
    files_named,
)
from grpo_run.runtime.launch.sources import imported_names, local_modules, parsed, variables_read


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script with two local modules, one of them imported by the other, and a package."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import os, rewards\nfrom lib import data\nos.environ.get('STAGE')\n")
    (tmp_path / "rewards.py").write_text("import torch\nimport common\n")
    (tmp_path / "common.py").write_text("import rewards\n")
    (tmp_path / "unused.py").write_text("")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("")
    (tmp_path / "lib" / "data.py").write_text("")
    (tmp_path / "config.yaml").write_text("lr: 1\n")
    return tmp_path / "train.py"


ARGUMENTS = ["--config", "config.yaml", "--lr", "1"]
ENVIRONMENT = {"STAGE": "1", "SEED": "1", "HF_TOKEN": "abc", "SLURM_JOB_ID": "7", "UNRELATED": "x"}


def now(
    script: Path, *, environment: dict[str, str] | None = None, settings: dict[str, object] | None = None
) -> Inputs:
    """The inputs as they are now."""
    return collect(
        local_modules(script), ARGUMENTS, environment or ENVIRONMENT, settings or {"--generation max_time": 3}
    )


def test_local_modules_are_followed_and_installed_ones_are_not(script: Path) -> None:
    """Also through a circle; a module that is not imported does not count."""
    assert {source.path.name for source in local_modules(script)} == {
        "train.py",
        "rewards.py",
        "common.py",
        "__init__.py",
        "data.py",
    }


def test_nothing_has_changed(script: Path) -> None:
    """Two readings of the same inputs are equal, also after a round trip through JSON."""
    first = Inputs.from_json(now(script).as_json())
    assert first == now(script)
    assert first is not None
    assert changes_of_training(first, now(script)) == []


@pytest.mark.parametrize("name", ["train.py", "rewards.py", "common.py", "lib/data.py", "config.yaml"])
def test_an_edited_file_is_named(script: Path, name: str) -> None:
    """The script, a module that it imports, and a file that its arguments name."""
    before = now(script)
    path = script.parent / name
    path.write_text(path.read_text() + "\n# edited\n")
    assert changes_of_training(before, now(script)) == [f"{name} was edited"]


def test_an_unused_file_may_change(script: Path) -> None:
    """Only what the script imports or names counts."""
    before = now(script)
    (script.parent / "unused.py").write_text("x = 1\n")
    assert changes_of_training(before, now(script)) == []


@pytest.mark.parametrize(
    ("changed", "described"),
    [
        ({"STAGE": "2"}, ["STAGE 1 -> 2"]),
        ({"SEED": "2"}, ["SEED 1 -> 2"]),
        ({"SLURM_JOB_ID": "8"}, []),
        ({"UNRELATED": "y"}, []),
    ],
)
def test_variables_that_the_script_names_or_libraries_read_are_compared(
    script: Path, changed: dict[str, str], described: list[str]
) -> None:
    """What a scheduler sets for each job is not."""
    assert changes_of_training(now(script), now(script, environment={**ENVIRONMENT, **changed})) == described


def test_a_variable_that_is_no_longer_set_is_named(script: Path) -> None:
    """Its absence may change the training too."""
    without = {name: value for name, value in ENVIRONMENT.items() if name != "SEED"}
    assert changes_of_training(now(script), now(script, environment=without)) == ["SEED 1 -> not set"]


def test_secrets_are_neither_recorded_nor_shown(script: Path) -> None:
    """A digest tells that a token has changed."""
    script.write_text("import os\nos.environ['HF_TOKEN']\n")
    before, after = now(script), now(script, environment={**ENVIRONMENT, "HF_TOKEN": "def"})
    assert "abc" not in str(before.as_json())
    assert changes_of_training(before, after) == ["HF_TOKEN changed"]


def test_settings_are_compared(script: Path) -> None:
    """Options of the launch that change training."""
    after = now(script, settings={"--generation max_time": 5})
    assert changes_of_training(now(script), after) == ["--generation max_time 3 -> 5"]


def test_versions_are_told_apart_from_changes_of_training() -> None:
    """Another version is reported, not refused."""
    before, after = Inputs(versions={"torch": "2.13"}), Inputs(versions={"torch": "2.14"})
    assert changes_of_training(before, after) == []
    assert changes_of_versions(before, after) == ["torch 2.13 -> 2.14"]


@pytest.mark.parametrize(
    "source",
    [
        "os.environ['A']",
        "os.environ.get('A')",
        "environ.get('A', 1)",
        "os.getenv('A')",
        "from os import getenv; getenv('A')",
    ],
)
def test_variables_are_found_in_every_usual_form(source: str) -> None:
    """Under a literal name."""
    assert variables_read(parsed(source)) == {"A"}


@pytest.mark.parametrize("source", ["def (", "x = '\0'", "a.get('A')", "os.environ[name]"])
def test_other_code_names_no_variable(source: str) -> None:
    """Invalid source is left to Python to report."""
    assert variables_read(parsed(source)) == set()
    assert imported_names(parsed("import (")) == set()


def test_files_are_found_as_a_word_or_after_an_equals_sign(script: Path) -> None:
    """Other words, directories and missing files are not files."""
    assert files_named(["--config=config.yaml", "x", "lib", "", "missing=", "rewards.py"]) == [
        script.parent / "config.yaml", script.parent / "rewards.py",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [None, [], {}, {"files": []}])
def test_an_older_record_is_not_compared(value: object) -> None:
    """A run directory of an earlier release has none."""
    assert Inputs.from_json(value) is None
