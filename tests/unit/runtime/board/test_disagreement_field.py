"""What was proved of ranks that do not make the same calls: published once, read by ranks that wait."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from grpo_run.runtime.board._header import MAX_DISAGREEMENT_TEXT_BYTES
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.exchange import CHANNELS
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.awaited import AwaitedRank


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board of two slots."""
    return Board.create(tmp_path / "board.mmap", 2)


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_rank_that_sleeps_is_woken_and_reads_the_text(board: Board, channel: str) -> None:
    """It returns long before its time limit."""
    exchange = board.exchange(0, attempt=0, channel=channel)
    assert exchange is not None
    assert exchange.disagreement == ""
    timer = threading.Timer(0.2, board.publish_disagreement, ["rank 1 is elsewhere: ä"])
    began = time.monotonic()
    timer.start()
    while not exchange.disagreement:
        exchange.wait(1, 0, 20.0)
    assert time.monotonic() - began < 15.0
    assert exchange.disagreement == "rank 1 is elsewhere: ä"
    timer.join()


def test_the_text_belongs_to_its_attempt(board: Board) -> None:
    """The ranks of the next attempt do not raise it."""
    board.publish_disagreement("old")
    board.begin_attempt(1)
    exchange = board.exchange(0, attempt=1, channel=CHANNELS[1])
    assert exchange is not None
    assert exchange.disagreement == ""
    board.publish_disagreement("x" * 5000)
    assert exchange.disagreement == "x" * MAX_DISAGREEMENT_TEXT_BYTES


def test_fields_of_the_header_do_not_overlap(board: Board) -> None:
    """Neither changes the other, at their longest."""
    awaited = AwaitedRank(
        rank=1,
        phase=Phase.callback,
        callback="c" * 200,
        since_seconds=1.5,
        deadline_at_seconds=2.5,
        busy=True,
        waiters=tuple(range(64)),
        exiting=False,
    )
    board.publish_disagreement("y" * MAX_DISAGREEMENT_TEXT_BYTES)
    board.write_awaited(awaited)
    exchange = board.exchange(0, attempt=0, channel=CHANNELS[0])
    assert exchange is not None
    assert exchange.disagreement == "y" * MAX_DISAGREEMENT_TEXT_BYTES
    assert board.read_awaited() == awaited
