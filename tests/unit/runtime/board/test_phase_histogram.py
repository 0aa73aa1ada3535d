"""A rank's tally: every phase is counted once, and the first of its kind apart."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.board.phase_histogram import (
    HISTOGRAMS_BYTES,
    PhaseHistogramWriter,
    read_phase_histograms,
)
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Durations

OFFSET = 128


@pytest.fixture
def memory() -> mmap.mmap:
    """Zeroed memory with a neighbour on each side."""
    return mmap.mmap(-1, OFFSET + HISTOGRAMS_BYTES + OFFSET)


@given(seconds=st.lists(st.floats(0.0, 1e5), min_size=1, max_size=30), phase=st.sampled_from(Phase))
def test_what_is_read_is_what_durations_would_make_of_it(seconds: list[float], phase: Phase) -> None:
    """The same first, the same longest, the same counts; every other phase is absent."""
    memory = mmap.mmap(-1, OFFSET + HISTOGRAMS_BYTES)
    writer = PhaseHistogramWriter(memory, OFFSET)
    for value in seconds:
        writer.add(phase, value)
    expected = Durations.of([max(seconds[0], 1e-9), *seconds[1:]])
    assert read_phase_histograms(memory, OFFSET) == {phase: expected}


def test_a_phase_never_ended_is_absent(memory: mmap.mmap) -> None:
    """Not one that took no time."""
    assert read_phase_histograms(memory, OFFSET) == {}


def test_a_first_occurrence_that_took_no_time_is_an_occurrence(memory: mmap.mmap) -> None:
    """A clock may stand still between two calls."""
    PhaseHistogramWriter(memory, OFFSET).add(Phase.vote, 0.0)
    assert set(read_phase_histograms(memory, OFFSET)) == {Phase.vote}


def test_phases_do_not_touch_each_other_nor_what_lies_beside(memory: mmap.mmap) -> None:
    """Each has its own counters, and the last ones end where the tallies do."""
    memory[:] = b"\xff" * OFFSET + bytes(HISTOGRAMS_BYTES) + b"\xff" * OFFSET
    writer = PhaseHistogramWriter(memory, OFFSET)
    for number, phase in enumerate(Phase, 1):
        for _ in range(number + 1):
            writer.add(phase, 1e6)
    tallies = read_phase_histograms(memory, OFFSET)
    assert [tallies[phase].count for phase in Phase] == list(range(1, len(Phase) + 1))
    assert all(tally.max_seconds == 1e6 for tally in tallies.values())
    assert memory[:OFFSET] == memory[OFFSET + HISTOGRAMS_BYTES :] == b"\xff" * OFFSET


def test_two_writers_on_two_slots_count_for_themselves() -> None:
    """Ranks share a file."""
    memory = mmap.mmap(-1, 2 * HISTOGRAMS_BYTES)
    first, second = PhaseHistogramWriter(memory, 0), PhaseHistogramWriter(memory, HISTOGRAMS_BYTES)
    first.add(Phase.data, 1.0)
    second.add(Phase.data, 2.0)
    assert read_phase_histograms(memory, 0)[Phase.data].first_seconds == 1.0
    assert read_phase_histograms(memory, HISTOGRAMS_BYTES)[Phase.data].first_seconds == 2.0
