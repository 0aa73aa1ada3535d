"""Readings of a board in the unit tests of its parts."""

from __future__ import annotations

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import Slot


def seen(board: Board, index: int = 1) -> Slot:
    """Return a reading that must exist."""
    slot = board.read(index)
    assert slot is not None
    return slot
