"""A call that has started."""

from __future__ import annotations

from typing import Any

import pytest
from support.builders.trainers.callback_loop import Loop


@pytest.fixture
def loop(session: Any) -> Loop:
    """A loop that has started."""
    made = Loop(session)
    made.begin()
    return made
