"""Phase histograms: every phase is counted once, and first occurrences are stored separately."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.board._phase_histogram import (
    HISTOGRAMS_BYTES,
    PHASES,
    PhaseHistogramWriter,
    read_phase_histograms,
)
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Durations

OFFSET = 128


@pytest.fixture
def memory() -> mmap.mmap:
    """Zeroed memory with other data on both sides."""
    return mmap.mmap(-1, OFFSET + HISTOGRAMS_BYTES + OFFSET)


@given(seconds=st.lists(st.floats(0.0, 1e5), min_size=1, max_size=30), phase=st.sampled_from(PHASES))
def test_a_histogram_equals_the_durations_of_its_phases(seconds: list[float], phase: Phase) -> None:
    """The same first and longest duration and the same counts; other phases are absent."""
    memory = mmap.mmap(-1, OFFSET + HISTOGRAMS_BYTES)
    writer = PhaseHistogramWriter(memory, OFFSET)
    for value in seconds:
        writer.add(phase, value)
    expected = Durations.of([max(seconds[0], 1e-9), *seconds[1:]])
    assert read_phase_histograms(memory[OFFSET:]) == {phase: expected}


def test_a_phase_never_ended_is_absent(memory: mmap.mmap) -> None:
    """It is not a phase of zero length."""
    assert read_phase_histograms(memory[OFFSET:]) == {}


def test_a_first_occurrence_of_zero_length_counts(memory: mmap.mmap) -> None:
    """The clock may not advance between two calls."""
    PhaseHistogramWriter(memory, OFFSET).add(Phase.vote, 0.0)
    assert set(read_phase_histograms(memory[OFFSET:])) == {Phase.vote}


def test_phases_have_separate_counters(memory: mmap.mmap) -> None:
    """Nothing outside the histograms is written."""
    memory[:] = b"\xff" * OFFSET + bytes(HISTOGRAMS_BYTES) + b"\xff" * OFFSET
    writer = PhaseHistogramWriter(memory, OFFSET)
    for number, phase in enumerate(PHASES, 1):
        for _ in range(number + 1):
            writer.add(phase, 1e6)
    histograms = read_phase_histograms(memory[OFFSET:])
    assert [histograms[phase].count for phase in PHASES] == list(range(1, len(PHASES) + 1))
    assert all(durations.max_seconds == 1e6 for durations in histograms.values())
    assert memory[:OFFSET] == memory[OFFSET + HISTOGRAMS_BYTES :] == b"\xff" * OFFSET


def test_two_slots_have_separate_histograms() -> None:
    """Ranks share a file."""
    memory = mmap.mmap(-1, 2 * HISTOGRAMS_BYTES)
    first, second = PhaseHistogramWriter(memory, 0), PhaseHistogramWriter(memory, HISTOGRAMS_BYTES)
    first.add(Phase.data, 1.0)
    second.add(Phase.data, 2.0)
    assert read_phase_histograms(memory[:])[Phase.data].first_seconds == 1.0
    assert read_phase_histograms(memory[HISTOGRAMS_BYTES:])[Phase.data].first_seconds == 2.0
