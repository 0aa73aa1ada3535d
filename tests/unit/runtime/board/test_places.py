"""The place of every field on disk, and a rank's memory there: what it has written, or nothing."""

from __future__ import annotations

import struct
from dataclasses import fields
from pathlib import Path

import pytest

from grpo_run.runtime.board._header import HEADER_BYTES
from grpo_run.runtime.board._slot_layout import SLOT_BYTES
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.memory_area import MEMORY_AREA_BYTES
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS

INTEGERS = [
    "train_call", "step", "target_steps", "voted_step", "committed_step", "resumed_step", "checkpoint_step",
    "voted_at_ns", "train_started_ns", "tokens_generated", "rewards_scored", "votes", "cleanup_runs",
    "no_trainer_after",
]  # fmt: skip
FLOATS = [
    "vote_wait_seconds", "cleanup_seconds", "checkpoint_seconds", "ended_eos", "ended_length",
    "ended_repetition",
    "ended_deadline", "generation_limit", "prompt_tokens", "prompt_length",
]  # fmt: skip
FIGURES = [field.name for field in fields(RankMemory) if field.name != "phases"]


def test_every_field_keeps_its_place_on_disk(tmp_path: Path) -> None:
    """Offsets and formats are part of the file format."""
    path = tmp_path / "board.mmap"
    board = Board.create(path, 2)
    writer = board.writer(1, rank=5, pid=4711, attempt=3)
    for number, name in enumerate(INTEGERS, start=1):
        setattr(writer, name, number)
    for number, name in enumerate(FLOATS, start=1):
        setattr(writer, name, number / 4)
    writer.log(dict(zip(LOGGED_FIELDS, range(100), strict=False)))
    writer.publish()
    slot = path.read_bytes()[HEADER_BYTES + SLOT_BYTES :]
    assert struct.unpack_from("<IIII", slot, 8) == (5, 1, 4711, 3)
    assert struct.unpack_from("<iiiiiiiQQQQQQH", slot, 256) == tuple(range(1, 15))
    assert struct.unpack_from("<11d", slot, 384) == (*(number / 4 for number in range(1, 11)), 0.0)
    assert struct.unpack_from(f"<{len(LOGGED_FIELDS)}d", slot, 576) == tuple(range(len(LOGGED_FIELDS)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A board with two slots."""
    path = tmp_path / "board.mmap"
    Board.create(path, 2)
    return path


def area_at(path: Path, index: int) -> int:
    """Where a rank's area begins: they are the last part of the board."""
    return path.stat().st_size - (2 - index) * MEMORY_AREA_BYTES


def test_another_process_reads_what_a_rank_has_measured(path: Path) -> None:
    """Every figure under its own name; phases that were not measured are missing."""
    writer = Board.open(path, writable=True).writer(1, rank=5, pid=4711, attempt=3).memory_area
    for number, name in enumerate(FIGURES, start=2):
        setattr(writer.totals, name, number * 10**9)
    figures = writer.figures(Phase.generate)
    for number, name in enumerate(figures.__slots__, start=1):
        setattr(figures, name, number)
    writer.publish(Phase.generate)
    writer.figures(Phase.callback).resident_bytes = 7
    writer.publish(Phase.callback)

    board = Board.open(path)
    memory = board.rank_memory(1)
    assert memory is not None
    assert memory.as_json() == {
        "has_device": True, "capacity_bytes": 3 * 10**9, "readings": 4 * 10**9, "spent_seconds": 5.0,
        "allocated_bytes": 6 * 10**9, "reserved_bytes": 7 * 10**9, "inactive_split_bytes": 8 * 10**9,
        "resident_bytes": 9 * 10**9, "peak_allocated_bytes": 10**10, "peak_reserved_bytes": 11 * 10**9,
        "retries": 12 * 10**9, "ooms": 13 * 10**9, "released_bytes": 14 * 10**9, "freed_bytes": 15 * 10**9,
        "phases": {
            "generate": {
                "readings": 1, "peak_allocated_bytes": 2, "peak_reserved_bytes": 3, "allocated_bytes": 4,
                "reserved_bytes": 5, "inactive_split_bytes": 6, "retries": 7, "peak_resident_bytes": 8,
                "resident_bytes": 9,
            },
            "callback": {
                "readings": 0, "peak_allocated_bytes": 0, "peak_reserved_bytes": 0, "allocated_bytes": 0,
                "reserved_bytes": 0, "inactive_split_bytes": 0, "retries": 0, "peak_resident_bytes": 0,
                "resident_bytes": 7,
            },
        },
    }  # fmt: skip
    assert board.rank_memory(0) is None


def test_every_figure_keeps_its_place_on_disk(path: Path) -> None:
    """Offsets and formats are part of the file format: a supervisor may be older than its ranks."""
    writer = Board.open(path, writable=True).writer(0, rank=0, pid=1, attempt=0).memory_area
    for number, name in enumerate(FIGURES, start=1):
        setattr(writer.totals, name, number)
    for number, name in enumerate(writer.figures(Phase.startup).__slots__, start=1):
        setattr(writer.figures(Phase.startup), name, number)
    writer.publish(Phase.startup)
    raw = path.read_bytes()[area_at(path, 0) :]
    assert struct.unpack_from("<16Q", raw) == (2, *range(1, 15), 0)
    assert struct.unpack_from("<10Q", raw, 128) == (*range(1, 10), 0)
    assert MEMORY_AREA_BYTES == 128 + 24 * 80


def test_a_new_attempt_begins_with_no_figures(path: Path) -> None:
    """Neither the supervisor nor the next rank leaves those of the attempt before."""
    board = Board.open(path, writable=True)
    board.writer(0, rank=0, pid=1, attempt=0).memory_area.publish()
    assert board.rank_memory(0) is not None
    board.begin_attempt(1)
    assert board.rank_memory(0) is None
    board.writer(0, rank=0, pid=1, attempt=1).memory_area.publish()
    board.writer(0, rank=0, pid=2, attempt=1)
    assert board.rank_memory(0) is None


def test_a_write_that_never_ended_is_not_read(path: Path) -> None:
    """The rank was killed in the middle of it."""
    board = Board.open(path, writable=True)
    board.writer(0, rank=0, pid=1, attempt=0).memory_area.publish()
    with open(path, "r+b") as file:
        file.seek(area_at(path, 0))
        file.write(struct.pack("<Q", 3))
    assert board.rank_memory(0) is None
