"""Durations of callbacks on the board: kept by name, in a table of fixed size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_run.runtime.board._header import HEADER_BYTES
from grpo_run.runtime.board._phase_histogram import CALLBACKS_BYTES, ENTRIES, OTHERS
from grpo_run.runtime.board._slot_layout import SLOT_BYTES
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.exchange import EXCHANGE_BYTES
from grpo_run.runtime.board.memory_area import MEMORY_AREA_BYTES
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.watchdog.observation import Phase


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board of two slots."""
    return Board.create(tmp_path / "board.mmap", 2)


def run(writer: SlotWriter, name: str, times: int = 1) -> None:
    """Run a callback to its end."""
    for _ in range(times):
        writer.enter_callback(name)
        writer.leave(Phase.callback)


def test_the_open_callback_is_readable_and_its_durations_are_kept_by_name(board: Board) -> None:
    """Also inside another callback; the first occurrence is stored separately."""
    writer = board.writer(1, rank=1, pid=os.getpid(), attempt=0)
    run(writer, "Upload.on_save", 4)
    writer.enter_callback("Judge.on_step_end")
    writer.enter(Phase.eval)
    writer.enter_callback("Upload.on_evaluate")
    slot = board.read(1)
    assert slot is not None
    assert [one.key for one in slot.phases] == ["Judge.on_step_end", Phase.eval, "Upload.on_evaluate"]
    assert (slot.phase, slot.callback) == (Phase.callback, "Upload.on_evaluate")
    writer.leave(Phase.callback)
    slot = board.read(1)
    assert slot is not None
    assert (slot.phase, slot.callback) == (Phase.eval, "Judge.on_step_end")
    histograms = board.phase_histograms(1)
    assert set(histograms) == {"Upload.on_save", "Upload.on_evaluate"}
    assert histograms["Upload.on_save"].count == 3
    assert histograms["Upload.on_save"].first_seconds > 0
    assert board.phase_histograms(0) == {}


def test_further_callbacks_share_the_last_entry_of_a_full_table(board: Board) -> None:
    """A script may make a class for each step; the table does not grow, and nothing else is overwritten."""
    neighbour = board.writer(1, rank=1, pid=os.getpid(), attempt=0)
    run(neighbour, "Neighbour.on_save", 2)
    writer = board.writer(0, rank=0, pid=os.getpid(), attempt=0)
    for number in range(ENTRIES + 10):
        run(writer, f"Callback{number}.on_step_end", 2)
    histograms = board.phase_histograms(0)
    assert len(histograms) == ENTRIES
    assert histograms[OTHERS].count == 2 * 11 - 1
    assert set(board.phase_histograms(1)) == {"Neighbour.on_save"}


def test_a_long_name_keeps_its_event(board: Board) -> None:
    """Names in other alphabets are cut at a character."""
    writer = board.writer(0, rank=0, pid=os.getpid(), attempt=0)
    run(writer, "é" * 60 + ".on_step_end")
    (name,) = board.phase_histograms(0)
    assert isinstance(name, str)
    assert name.endswith("é.on_step_end")


def test_a_new_attempt_begins_with_empty_tables(board: Board) -> None:
    """What earlier attempts have learned is in the journal."""
    run(board.writer(1, rank=1, pid=os.getpid(), attempt=0), "Upload.on_save", 2)
    board.begin_attempt(1)
    assert board.phase_histograms(1) == {}


def test_a_forked_child_writes_to_no_table(board: Board, tmp_path: Path) -> None:
    """It is not the rank."""
    writer = board.writer(0, rank=0, pid=os.getpid(), attempt=0)
    writer.detach()
    run(writer, "Upload.on_save", 2)
    assert board.phase_histograms(0) == {}
    assert next(tmp_path.glob("board*")).stat().st_size == HEADER_BYTES + 2 * (
        SLOT_BYTES + CALLBACKS_BYTES + EXCHANGE_BYTES + MEMORY_AREA_BYTES
    )
