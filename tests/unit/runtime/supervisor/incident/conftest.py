"""A run directory that can be written."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.runtime.incident_scene import Scene


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A run directory that can be written."""
    return Scene(tmp_path / "run", monkeypatch)
