"""What is asked and said through the header of a board reaches every reader of it."""

from __future__ import annotations

import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.board._header import (
    AWAITED_FIELD_AT,
    HEADER_BYTES,
    MAX_AWAITED_TEXT_BYTES,
    MAX_DISAGREEMENT_TEXT_BYTES,
)
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.exchange import CHANNELS
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.awaited import AwaitedRank


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the board is."""
    return tmp_path / "board.mmap"


def awaited(**changes: Any) -> AwaitedRank:
    """Rank 0 has waited for rank 1 since 1,000 s."""
    fields: dict[str, Any] = {
        "rank": 1, "phase": Phase.reward, "since_seconds": 1000.125, "deadline_at_seconds": 1600.5,
        "busy": None, "waiters": (0, 2),
    }  # fmt: skip
    return AwaitedRank(**(fields | changes))


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
    board.write_awaited(awaited())
    board.publish_disagreement("rank 1 made another call")
    board.ask_to_stop()
    board.begin_attempt(2)
    assert board.read_awaited() is None
    assert path.read_bytes() == before


# ---- the rank that the others wait for ----


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"busy": True, "exiting": True},
        {"busy": False, "waiters": ()},
        {"deadline_at_seconds": math.inf},
        {"callback": "Hochladen_äß.on_save", "phase": Phase.callback},
    ],
)
def test_another_process_reads_which_rank_is_awaited(
    board: Board, path: Path, changes: dict[str, Any]
) -> None:
    """Until nobody waits any more."""
    reader = Board.open(path)
    assert reader.read_awaited() is None
    board.write_awaited(awaited(**changes))
    assert reader.read_awaited() == awaited(**changes)
    board.write_awaited(None)
    assert reader.read_awaited() is None


def test_an_awaited_rank_is_bounded(board: Board) -> None:
    """Names of callbacks and numbers of ranks are not."""
    assert AWAITED_FIELD_AT + MAX_AWAITED_TEXT_BYTES < HEADER_BYTES
    long = "\U0001f600" * 5000
    board.write_awaited(
        awaited(callback=long, place=long, outside="x" * 50, waiters=tuple(range(100_000, 200_000)))
    )
    read = board.read_awaited()
    assert read is not None
    assert (read.rank, read.phase) == (1, Phase.reward)
    assert 0 < len(read.callback) < 1000


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"rank": 1, "phase": "dreaming"}', b"\xff"])
def test_a_damaged_record_is_no_record(board: Board, path: Path, text: bytes) -> None:
    """Written by another version, or by anything else."""
    board.write_awaited(awaited())
    raw = bytearray(path.read_bytes())
    at = raw.index(b'{"rank"')
    raw[at : at + 600] = text.ljust(600)
    path.write_bytes(raw)
    assert Board.open(path).read_awaited() is None


def test_a_record_is_never_mixed_from_two(board: Board, path: Path) -> None:
    """A reader that meets a write reads again."""
    reader = Board.open(path)
    both = (awaited(), awaited(rank=0, phase=Phase.data, callback="A" * 150, since_seconds=1.0))
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for record in both:
                board.write_awaited(record)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        read = {reader.read_awaited() for _ in range(3000)}
    finally:
        stop.set()
        thread.join()
    assert read | {reader.read_awaited()} <= {*both, None}
    assert reader.read_awaited() in both


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


def test_a_disagreement_belongs_to_its_attempt_and_to_its_field(board: Board) -> None:
    """The ranks of the next attempt do not raise it. At their longest, the fields do not overlap."""
    board.publish_disagreement("old")
    board.begin_attempt(1)
    exchange = board.exchange(0, attempt=1, channel=CHANNELS[1])
    assert exchange.disagreement == ""
    board.publish_disagreement("x" * 5000)
    longest = awaited(callback="c" * 200, waiters=tuple(range(64)))
    board.write_awaited(longest)
    assert exchange.disagreement == "x" * MAX_DISAGREEMENT_TEXT_BYTES
    assert board.read_awaited() == longest
