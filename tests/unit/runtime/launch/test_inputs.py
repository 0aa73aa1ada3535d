"""What a run depends on is recorded and compared: files, variables, settings and versions."""

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

ENVIRONMENT = {"SEED": "1", "HF_TOKEN": "abc", "SLURM_JOB_ID": "7", "STAGE": "1"}


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script, a module that it imports, and a configuration file."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.py", "lib/data.py", "config.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path / "train.py"


def now(*, max_time: int = 3, **environment: str) -> Inputs:
    """The inputs as they are now."""
    files = ["train.py", "lib/data.py", "config.yaml"]
    return collect(files, ENVIRONMENT | environment, {"--generation max_time": max_time})


def test_nothing_has_changed(script: Path) -> None:
    """Two readings of the same inputs are equal, also after a round trip through JSON."""
    first = Inputs.from_json(now().as_json())
    assert first == now()
    assert first is not None
    assert changes_of_training(first, now()) == []


@pytest.mark.parametrize("name", ["train.py", "lib/data.py", "config.yaml"])
def test_an_edited_file_is_named(script: Path, name: str) -> None:
    """As it is named from the working directory; a deleted one too."""
    before = now()
    (script.parent / name).write_text("# edited\n")
    assert changes_of_training(before, now()) == [f"{name} was edited"]
    (script.parent / name).unlink()
    assert changes_of_training(before, now()) == [f"{name} is gone"]


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({"SEED": "2"}, ["SEED 1 -> 2"]),
        ({"PYTHONHASHSEED": "0"}, ["PYTHONHASHSEED not set -> 0"]),
        ({"STAGE": "2", "OTHER": "", "SLURM_JOB_ID": "8"}, []),
    ],
)
def test_a_few_variables_are_asked_about(script: Path, changed: dict[str, str], asked: list[str]) -> None:
    """The others may be those of a scheduler or a terminal."""
    assert changes_of_training(now(), now(**changed)) == asked


def test_other_variables_are_not_recorded(script: Path) -> None:
    """They may be secrets."""
    assert "HF_TOKEN" not in str(now().as_json())
    assert "abc" not in str(now().as_json())


def test_inputs_of_an_earlier_release_are_compared(script: Path) -> None:
    """It recorded more."""
    assert Inputs.from_json(now().as_json() | {"environment": {"STAGE": "1"}}) == now()


def test_settings_and_versions_are_compared(script: Path) -> None:
    """Options of the launch that change training; another version of a library is reported, not refused."""
    assert changes_of_training(now(), now(max_time=5)) == ["--generation max_time 3 -> 5"]
    before, after = Inputs(versions={"torch": "2.13"}), Inputs(versions={"torch": "2.14"})
    assert changes_of_training(before, after) == []
    assert changes_of_versions(before, after) == ["torch 2.13 -> 2.14"]


def test_files_are_found_as_a_word_or_after_an_equals_sign(script: Path) -> None:
    """Other words, directories and missing files are not files."""
    assert files_named(["--config=config.yaml", "x", "lib", "", "missing=", "train.py"]) == [
        script.parent / "config.yaml", script,
    ]  # fmt: skip


@pytest.mark.parametrize("value", [None, [], {}, {"files": []}])
def test_a_damaged_record_is_not_compared(value: object) -> None:
    """Nothing is known then."""
    assert Inputs.from_json(value) is None
