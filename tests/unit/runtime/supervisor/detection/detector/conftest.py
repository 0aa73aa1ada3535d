"""Ranks in training, before any of them waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.builders.runtime.detector_world import World


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Create a world."""
    return lambda *args, **options: World(tmp_path / "board.mmap", monkeypatch, *args, **options)


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    """Two ranks in training."""
    return make()
