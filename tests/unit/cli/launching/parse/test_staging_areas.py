"""Where snapshots are kept in memory, and when they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_run.cli.launching import _values as values
from grpo_run.cli.launching.command import parse


def test_staging_areas_are_in_a_folder_of_the_user(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the given directory; parsing creates nothing of the run's."""
    memory, other = here / "memory", here / "other"
    memory.mkdir()
    other.mkdir()
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", memory)
    for root in (memory, other):
        folder = parse(["--snapshot-dir", str(root), "train.py"]).snapshot_folder
        assert folder == root / f"grpo-run-{os.getuid()}"
        assert list(folder.iterdir()) == []
    assert parse(["--snapshot-dir", "off", "train.py"]).snapshot_folder is None
    # each of several nodes would hold a part, so ranks write directly to disk
    assert parse(["--snapshot-dir", str(memory), "--nnodes", "2", "train.py"]).snapshot_folder is None


def test_an_unusable_default_directory_disables_staging(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not exist, or cannot be written; the user did not ask for it, so it is no error."""
    memory = here / "memory"
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", memory)
    assert parse(["--snapshot-dir", str(memory), "train.py"]).snapshot_folder is None
    monkeypatch.setattr(values, "SHARED_MEMORY_ROOT", Path("/proc"))  # no user can create a folder there
    assert parse(["--snapshot-dir", "/proc", "train.py"]).snapshot_folder is None
