"""What is asked and said through the header of a board reaches every reader of it."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from grpo_run.runtime.board._header import HEADER_BYTES, MAX_DISAGREEMENT_TEXT_BYTES
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.exchange import CHANNELS
from grpo_run.runtime.board.slot_writer import SlotWriter


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the board is."""
    return tmp_path / "board.mmap"


def test_requests_reach_every_reader(board: Board, writer: SlotWriter, path: Path) -> None:
    """A command writes them, the ranks read them. The slots do not change."""
    before, rank, command = repr(board.read(1)), Board.map(path), Board.open(path, writable=True)
    assert rank.requests == (False, 0)
    command.request_save()
    command.request_save()
    assert rank.requests == (False, 2)
    command.request_stop()
    assert rank.requests == (True, 2)
    assert repr(board.read(1)) == before


def test_requested_saves_are_counted_over_attempts(board: Board) -> None:
    """A rank compares with the count at its start; a smaller count would hide the next request."""
    board.request_save()
    before = board.requests[1]
    board.begin_attempt(1)
    board.request_save()
    assert board.requests[1] > before


@pytest.mark.parametrize("size", [0, HEADER_BYTES])
def test_writing_to_a_truncated_board_changes_nothing(board: Board, path: Path, size: int) -> None:
    """The file does not grow again: its ranks have ended or will, and the next attempt gets a new one. A
    write beyond the end of a mapping would end the supervisor by SIGBUS.
    """
    os.truncate(path, size)
    before = path.read_bytes()
    board.request_stop()
    board.request_save()
    board.announce_short_memory(True)
    board.publish_disagreement("rank 1 made another call")
    board.ask_to_stop()
    board.begin_attempt(2)
    assert path.read_bytes() == before


# ---- what was proved of ranks that do not make the same calls ----


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_rank_that_sleeps_is_woken_and_reads_the_disagreement(board: Board, channel: str) -> None:
    """It returns long before its time limit."""
    exchange = board.exchange(0, attempt=0, channel=channel)
    assert exchange.disagreement == ""
    timer = threading.Timer(0.2, board.publish_disagreement, ["rank 1 is elsewhere: ä"])
    began = time.monotonic()
    timer.start()
    while not exchange.disagreement:
        exchange.wait(1, 0, 20.0)
    assert time.monotonic() - began < 15.0
    assert exchange.disagreement == "rank 1 is elsewhere: ä"
    timer.join()


def test_a_disagreement_belongs_to_its_attempt_and_is_bounded(board: Board) -> None:
    """The ranks of the next attempt do not raise it. A longer text loses its end."""
    board.publish_disagreement("old")
    board.begin_attempt(1)
    exchange = board.exchange(0, attempt=1, channel=CHANNELS[1])
    assert exchange.disagreement == ""
    board.publish_disagreement("x" * 5000)
    assert exchange.disagreement == "x" * MAX_DISAGREEMENT_TEXT_BYTES
