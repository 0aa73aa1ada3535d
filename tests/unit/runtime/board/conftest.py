"""A board with two slots, and the writer of one of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board with two slots."""
    return Board.create(tmp_path / "board.mmap", 2)


@pytest.fixture
def writer(board: Board) -> SlotWriter:
    """The slot of local rank 1, which is global rank 5."""
    return board.writer(1, rank=5, pid=4711, attempt=3)
