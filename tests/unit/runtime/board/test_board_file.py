"""How a board is read where read calls do not see what is written to mappings, as on some network file systems."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.header import HEADER_BYTES
from grpo_run.runtime.board.storage import READS_MAPPING_AT
from grpo_run.watchdog.observation import Phase


@pytest.fixture
def reads_miss_mappings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read calls see what write calls have written, and nothing else."""
    written: dict[int, int] = {}
    pwrite = os.pwrite

    def write(descriptor: int, content: bytes, offset: int) -> int:
        written.update(enumerate(content, offset))
        return pwrite(descriptor, content, offset)

    def read(descriptor: int, size: int, offset: int) -> bytes:
        return bytes(written.get(at, 0) for at in range(offset, offset + size))

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(os, "pread", read)


@pytest.mark.usefixtures("reads_miss_mappings")
def test_a_board_is_read_through_a_mapping_where_read_calls_miss_what_ranks_write(tmp_path: Path) -> None:
    """By its creator and by commands; a hang would go unseen otherwise."""
    path = tmp_path / "board.mmap"
    board = Board.create(path, 1)
    command = Board.open(path)
    writer = Board.map(path).writer(0, rank=0, pid=1, attempt=0)
    writer.enter(Phase.generate)
    writer.publish()
    for reader in (board, command):
        slot = reader.read(0)
        assert slot is not None
        assert slot.phase is Phase.generate
    os.truncate(path, HEADER_BYTES)
    assert board.read(0) is None
    assert command.read_all() == [None]


def test_elsewhere_the_mapping_is_not_read(tmp_path: Path) -> None:
    """The note in the header is not set, and the trial leaves nothing behind."""
    Board.create(tmp_path / "board.mmap", 1)
    header = (tmp_path / "board.mmap").read_bytes()[READS_MAPPING_AT:256]
    assert header == bytes(len(header))
