"""Fixtures for the tests of checkpoints on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.manifests import publish


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A complete checkpoint of step 5."""
    publish(tmp_path / "checkpoint-5")
    return tmp_path / "checkpoint-5"
