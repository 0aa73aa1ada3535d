"""What is asked through the header of a board reaches every mapping of it."""

from __future__ import annotations

import os
from pathlib import Path

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter


def test_requests_reach_every_mapping(tmp_path: Path) -> None:
    """A command writes them, the ranks read them."""
    path = tmp_path / "board.mmap"
    Board.create(path, 1)
    rank = Board.open(path, writable=True)
    assert rank.requests == (False, 0)
    asking = Board.open(path, writable=True)
    asking.request_save()
    asking.request_save()
    assert rank.requests == (False, 2)
    asking.request_stop()
    assert rank.requests == (True, 2)


def test_a_request_does_not_change_the_slots(board: Board, writer: SlotWriter) -> None:
    """Header and slots are separate."""
    before = repr(board.read(1))
    board.request_save()
    board.request_stop()
    assert repr(board.read(1)) == before


def test_requested_saves_are_counted_over_attempts(board: Board) -> None:
    """A rank compares with the count at its start; a smaller count would hide the next request."""
    board.request_save()
    before = board.requests[1]
    board.begin_attempt(1)
    board.request_save()
    assert board.requests[1] > before


def test_a_flag_of_a_truncated_board_is_not_written(tmp_path: Path) -> None:
    """A write beyond the end of the file would end the supervisor by SIGBUS."""
    board = Board.create(tmp_path / "board.mmap", 1)
    os.truncate(tmp_path / "board.mmap", 0)
    board.announce_end(True)
    board.announce_short_memory(True)
    os.truncate(tmp_path / "board.mmap", 1 << 24)
    assert not board.ends_ranks
    assert not board.memory_is_short
