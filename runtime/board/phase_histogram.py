"""Histograms of phase durations in a rank's slot: logarithmic counters, the first occurrence and the longest.

Short phases end between two scans of the supervisor, so the rank counts them itself, in about 1 µs per phase.
Written by `slot_writer.py`, read by the hang detector. Does not decide how long is too long
(`watchdog.stalls.deadlines`).
"""

from __future__ import annotations

import mmap
import struct

from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.durations import BUCKETS, Durations, bucket_of

PHASES = tuple(phase for phase in Phase if phase is not Phase.callback)
"""Phases with a histogram here. Callbacks are measured by name (`callback_table.py`)."""
_PHASES = len(PHASES)
_COUNTS_BYTES = _PHASES * BUCKETS * 4
_DOUBLE = struct.Struct("<d")
_COUNT = struct.Struct("<I")
HISTOGRAMS_BYTES = _COUNTS_BYTES + 2 * _PHASES * 8
_SHORTEST_FIRST_SECONDS = 1e-9
"""Stored for a first occurrence of zero length: a stored 0 means that the phase never ended."""


class PhaseHistogramWriter:
    """Writer of one rank's histograms.

    Args:
        memory: the board's mapping.
        offset: where the slot's histograms begin; must be zeroed.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self._memory = memory
        self._counts_at = offset
        self._first_at = offset + _COUNTS_BYTES
        self._longest_at = self._first_at + _PHASES * 8
        self._counts = [[0] * BUCKETS for _ in range(_PHASES)]
        self._longest = [0.0] * _PHASES
        self._seen = [False] * _PHASES

    def add(self, phase: int, seconds: float) -> None:
        """Count one finished phase. The first occurrence of each phase is stored separately."""
        index = phase - 1
        if not self._seen[index]:
            self._seen[index] = True
            _DOUBLE.pack_into(self._memory, self._first_at + index * 8, max(seconds, _SHORTEST_FIRST_SECONDS))
            return
        bucket = bucket_of(seconds)
        counts = self._counts[index]
        counts[bucket] += 1
        _COUNT.pack_into(self._memory, self._counts_at + (index * BUCKETS + bucket) * 4, counts[bucket])
        if seconds > self._longest[index]:
            self._longest[index] = seconds
            _DOUBLE.pack_into(self._memory, self._longest_at + index * 8, seconds)

    def detach(self, private: mmap.mmap) -> None:
        """Write to `private` from now on."""
        self._memory = private


def read_phase_histograms(raw: bytes) -> dict[PhaseKey, Durations]:
    """Return the durations of every phase that has ended at least once in this attempt.

    Args:
        raw: a copy of the slot's histograms.
    """
    histograms: dict[PhaseKey, Durations] = {}
    for index, phase in enumerate(PHASES):
        (first,) = _DOUBLE.unpack_from(raw, _COUNTS_BYTES + index * 8)
        if not first:
            continue
        histograms[phase] = Durations(
            counts=struct.unpack_from(f"<{BUCKETS}I", raw, index * BUCKETS * 4),
            first_seconds=first,
            max_seconds=_DOUBLE.unpack_from(raw, _COUNTS_BYTES + _PHASES * 8 + index * 8)[0],
        )
    return histograms
