"""A working directory below a home without any run."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def at_home(here: Path) -> Path:
    """The working directory of the commands."""
    return here
