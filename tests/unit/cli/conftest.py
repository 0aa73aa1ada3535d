"""A working directory with a script, and an environment without variables of other launchers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: `train.py` in it, no runs."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "OMP_")):
            monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("print('training')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path
