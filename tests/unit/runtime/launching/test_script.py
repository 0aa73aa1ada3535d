"""Finding the script: by its path, or by the name of a module."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launching.script_file import check_output_directory, check_source


def test_what_python_refuses_for_its_depth_is_one_line(here: Path) -> None:
    """Its parser has a limit of its own."""
    (here / "train.py").write_bytes(b"x = " + b"(" * 500 + b")" * 500)
    with pytest.raises(UsageError, match=r"^train\.py, line 1: .*$"):
        check_source(Path("train.py"))


def test_what_python_warns_of_is_left_to_the_rank(here: Path, recwarn: pytest.WarningsRecorder) -> None:
    """The rank shows it."""
    (here / "train.py").write_bytes(b"x = '\\d'\n")
    check_source(here / "train.py")
    assert list(recwarn) == []


def test_a_pipe_is_left_to_the_script(here: Path) -> None:
    """It could be read only once."""
    os.mkfifo(here / "pipe.py")
    check_source(here / "pipe.py")


@pytest.mark.parametrize(("free_bytes", "warns"), [(100 << 20, True), (300 << 20, False)])
def test_a_disk_without_room_for_a_checkpoint_is_a_warning(
    here: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, warns: bool
) -> None:
    """Before the night; an adapter may still fit."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free_bytes))
    said = check_output_directory(["--output_dir", "new/deep"])
    text = "warning: output directory new/deep has 100 MiB free; make room for checkpoints"
    assert said == ([text] if warns else [])
