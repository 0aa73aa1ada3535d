"""A board needs read calls that see what is written to mappings, unlike those of some network file
systems.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import RunDirectoryError


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
def test_a_file_system_where_read_calls_miss_what_ranks_write_is_refused(tmp_path: Path) -> None:
    """A hang would go unseen otherwise."""
    with pytest.raises(RunDirectoryError, match="choose another with --run-dir"):
        Board.create(tmp_path / "board.mmap", 1)


def test_the_trial_leaves_nothing_behind(tmp_path: Path) -> None:
    """On other file systems."""
    Board.create(tmp_path / "board.mmap", 1)
    header = (tmp_path / "board.mmap").read_bytes()[56:256]
    assert header == bytes(len(header))
