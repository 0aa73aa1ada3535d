"""Fixtures for the tests of staging."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.snapshots.area import StagingArea


@pytest.fixture
def staging(tmp_path: Path) -> StagingArea:
    """Three empty slots."""
    return StagingArea(tmp_path / "memory")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The script's output directory, which does not exist yet."""
    return tmp_path / "disk" / "out"
