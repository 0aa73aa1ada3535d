"""The board's field for the rank that the others wait for."""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.board._header import AWAITED_FIELD_AT, HEADER_BYTES, MAX_AWAITED_TEXT_BYTES
from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.awaited import AwaitedRank


def awaited(**changes: Any) -> AwaitedRank:
    """Rank 0 has waited for rank 1 since 1,000 s."""
    fields: dict[str, Any] = {
        "rank": 1, "phase": Phase.reward, "since_seconds": 1000.125, "deadline_at_seconds": 1600.5,
        "busy": None, "waiters": (0, 2),
    }  # fmt: skip
    return AwaitedRank(**(fields | changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"busy": True},
        {"busy": False, "waiters": ()},
        {"deadline_at_seconds": math.inf},
        {"callback": "Hochladen_äß.on_save"},
    ],
)
def test_another_process_reads_what_was_written(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Through a mapping of its own."""
    board = Board.create(tmp_path / "board", 2)
    reader = Board.open(tmp_path / "board")
    assert reader.read_awaited() is None
    board.write_awaited(awaited(**changes))
    assert reader.read_awaited() == awaited(**changes)
    board.write_awaited(None)
    assert reader.read_awaited() is None


def test_a_record_is_bounded(tmp_path: Path) -> None:
    """Names of callbacks and numbers of ranks are not."""
    assert AWAITED_FIELD_AT + MAX_AWAITED_TEXT_BYTES < HEADER_BYTES
    board = Board.create(tmp_path / "board", 1)
    board.write_awaited(awaited(callback="\U0001f600" * 5000, waiters=tuple(range(100_000, 200_000))))
    read = board.read_awaited()
    assert read is not None
    assert (read.rank, read.phase) == (1, Phase.reward)
    assert 0 < len(read.callback) < 1000


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"rank": 1, "phase": "dreaming"}', b"\xff"])
def test_a_damaged_record_is_no_record(tmp_path: Path, text: bytes) -> None:
    """Written by another version, or by anything else."""
    path = tmp_path / "board"
    board = Board.create(path, 1)
    board.write_awaited(awaited())
    raw = bytearray(path.read_bytes())
    at = raw.index(b'{"rank"')
    raw[at : at + 600] = text.ljust(600)
    path.write_bytes(raw)
    assert Board.open(path).read_awaited() is None


def test_a_truncated_board_has_no_record(tmp_path: Path) -> None:
    """Access beyond the end of the file would end the process."""
    path = tmp_path / "board"
    board = Board.create(path, 1)
    path.open("r+b").truncate(0)
    board.write_awaited(awaited())
    assert board.read_awaited() is None


def test_a_record_is_never_mixed_from_two(tmp_path: Path) -> None:
    """A reader that meets a write reads again."""
    board = Board.create(tmp_path / "board", 1)
    reader = Board.open(tmp_path / "board")
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
