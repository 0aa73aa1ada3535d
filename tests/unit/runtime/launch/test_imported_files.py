"""The user's files that a rank has imported are recorded once with the digest that they had then."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy
import pytest

from grpo_run.runtime.launch import imported_files
from grpo_run.runtime.launch.imported_files import ImportedFiles, files_of_user, read_record, renew_record

RECORD = "imports.json"


def module(path: Path, content: str = "") -> types.ModuleType:
    """A module that was imported from a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    made = types.ModuleType(path.stem)
    made.__file__ = str(path)
    return made


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the record in it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_only_files_of_the_user_are_found(here: Path) -> None:
    """Not those of Python, of installed packages and of grpo-run, and no module without a file."""
    main = module(here / "train.py")
    loaded = {
        "__main__": main,
        "train": main,
        "rewards": module(here / "lib" / "rewards.py"),
        "numpy": numpy,
        "json": json,
        "other": module(here / "env" / "site-packages" / "other.py"),
        "grpo_run.runtime.files": module(here / "files.py"),
        "built_in": sys,
        "empty": types.ModuleType("empty"),
    }
    assert files_of_user(loaded) == [here / "train.py", here / "lib" / "rewards.py"]


def test_a_file_keeps_the_digest_that_it_had_at_first(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edit during training is a change; a module that is imported later is added, wherever the script has
    gone.
    """
    loaded = {"__main__": module(here / "train.py")}
    record = ImportedFiles(here / RECORD)
    record.update(loaded)
    first = read_record(here / RECORD)
    assert list(first) == ["train.py"]
    (here / "train.py").write_text("# edited")
    (here / "out").mkdir()
    monkeypatch.chdir(here / "out")
    record.update({**loaded, "late": module(here / "late.py")})
    assert list(read_record(here / RECORD)) == ["train.py", "late.py"]
    assert read_record(here / RECORD)["train.py"] == first["train.py"]


def test_the_record_is_bounded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In files, and in the size of each; a file that is gone is left out."""
    monkeypatch.setattr(imported_files, "MAX_FILES", 2)
    monkeypatch.setattr(imported_files, "MAX_FILE_BYTES", 1000)
    loaded = {name: module(here / f"{name}.py") for name in "abcd"}
    loaded["a"] = module(here / "a.py", "x" * 1001)
    (here / "b.py").unlink()
    record = ImportedFiles(here / RECORD)
    record.update(loaded)
    assert read_record(here / RECORD) == {}
    record.update(loaded)
    assert list(read_record(here / RECORD)) == ["c.py", "d.py"]


def test_an_accepted_change_is_the_new_record(here: Path) -> None:
    """Without a record there is nothing to renew."""
    renew_record(here / RECORD)
    assert not (here / RECORD).exists()
    ImportedFiles(here / RECORD).update({name: module(here / f"{name}.py") for name in ("a", "b")})
    before = read_record(here / RECORD)
    (here / "a.py").write_text("# edited")
    (here / "b.py").unlink()
    renew_record(here / RECORD)
    assert list(read_record(here / RECORD)) == ["a.py"]
    assert read_record(here / RECORD)["a.py"] != before["a.py"]


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_damaged_record_is_empty(here: Path, content: str) -> None:
    """Nothing is known then."""
    (here / RECORD).write_text(content)
    assert read_record(here / RECORD) == {}
