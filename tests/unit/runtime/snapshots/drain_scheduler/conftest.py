"""A run that has just started."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.runtime.draining_run import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run that has just started."""
    return World(tmp_path, monkeypatch)
