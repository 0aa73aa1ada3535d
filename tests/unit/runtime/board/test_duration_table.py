"""Durations on the board: each phase and callback is counted once, and first occurrences are stored apart."""

from __future__ import annotations

import mmap
import os
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.board._duration_table import (
    CALLBACKS,
    OTHERS,
    TABLE_BYTES,
    DurationTableWriter,
    read_durations,
    read_histograms,
)
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import HISTOGRAM_EDGES_SECONDS, Durations, bucket_of

OFFSET = 128
PHASES = [phase for phase in Phase if phase is not Phase.callback]


def run(writer: SlotWriter, name: str, times: int = 1) -> None:
    """Run a callback to its end."""
    for _ in range(times):
        writer.enter_callback(name)
        writer.leave(Phase.callback)


@given(
    seconds=st.lists(st.floats(0.0, 1e5), min_size=1, max_size=30),
    key=st.sampled_from([*PHASES, "Upload.on_save"]),
)
def test_an_entry_equals_the_durations_of_its_phase(seconds: list[float], key: Phase | str) -> None:
    """The same first and longest duration and the same counts; others are absent. A first occurrence of zero
    length counts: the clock may not advance between two calls.
    """
    memory = mmap.mmap(-1, OFFSET + TABLE_BYTES)
    writer = DurationTableWriter(memory, OFFSET)
    assert read_durations(memory[OFFSET:]) == {}
    number = key if isinstance(key, Phase) else writer.number_of(key)
    for value in seconds:
        writer.add(number, value)
    expected = Durations.of([max(seconds[0], 1e-9), *seconds[1:]])
    assert read_durations(memory[OFFSET:]) == {key: expected}
    ((phase, histogram),) = read_histograms(memory[OFFSET:]).items()
    assert phase is (key if isinstance(key, Phase) else Phase.callback)
    assert histogram.sum_seconds == pytest.approx(sum(seconds))
    for edge, below in zip(HISTOGRAM_EDGES_SECONDS, accumulate(histogram.counts), strict=False):
        assert below == sum(bucket_of(one) <= bucket_of(edge) - 1 for one in seconds)


def test_the_open_callback_is_readable_and_its_durations_are_kept_by_name(
    board: Board, writer: SlotWriter
) -> None:
    """Also inside another callback; the first occurrence is stored separately."""
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
    durations = board.durations(1)
    assert set(durations) == {"Upload.on_save", "Upload.on_evaluate"}
    assert durations["Upload.on_save"].count == 3
    assert durations["Upload.on_save"].first_seconds > 0
    assert board.durations(0) == {}


def test_further_callbacks_share_the_last_entry_of_a_full_table(board: Board, writer: SlotWriter) -> None:
    """A script may make a class for each step; the table does not grow, and nothing else is overwritten."""
    run(writer, "Neighbour.on_save", 2)
    own = board.writer(0, rank=0, pid=os.getpid(), attempt=0)
    for number in range(CALLBACKS + 10):
        run(own, f"Callback{number}.on_step_end", 2)
    durations = board.durations(0)
    assert len(durations) == CALLBACKS
    assert durations[OTHERS].count == 2 * 11 - 1
    assert set(board.durations(1)) == {"Neighbour.on_save"}


def test_a_long_name_keeps_its_event(board: Board, writer: SlotWriter) -> None:
    """Names in other alphabets are cut at a character."""
    run(writer, "é" * 60 + ".on_step_end")
    (name,) = board.durations(1)
    assert isinstance(name, str)
    assert name.endswith("é.on_step_end")
