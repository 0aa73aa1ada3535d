"""A rank's tally of how long its phases took, kept in its slot: counters on a logarithmic scale, first and longest.

Short phases end between two looks of the supervisor, so the rank counts them itself, in about a microsecond a
phase. The board's slot writer adds, the supervisor's watch reads. Does not decide how long is too long.
"""

from __future__ import annotations

import mmap
import struct

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import BUCKETS, Durations, bucket_of

_PHASES = len(Phase)
_COUNTS_BYTES = _PHASES * BUCKETS * 4
_DOUBLE = struct.Struct("<d")
_COUNT = struct.Struct("<I")
TALLIES_BYTES = _COUNTS_BYTES + 2 * _PHASES * 8


class TallyWriter:
    """Counts the phases of one rank.

    Args:
        memory: the board's mapping.
        offset: where the slot's tallies begin; zeroed.
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
        """Count one phase that has ended; the first of its kind is kept apart."""
        index = phase - 1
        if not self._seen[index]:
            self._seen[index] = True
            _DOUBLE.pack_into(self._memory, self._first_at + index * 8, max(seconds, 1e-9))
            return
        bucket = bucket_of(seconds)
        counts = self._counts[index]
        counts[bucket] += 1
        _COUNT.pack_into(self._memory, self._counts_at + (index * BUCKETS + bucket) * 4, counts[bucket])
        if seconds > self._longest[index]:
            self._longest[index] = seconds
            _DOUBLE.pack_into(self._memory, self._longest_at + index * 8, seconds)

    def disown(self, nowhere: mmap.mmap) -> None:
        """Write to `nowhere`."""
        self._memory = nowhere


def read_tallies(memory: mmap.mmap, offset: int) -> dict[Phase, Durations]:
    """What a slot's rank has counted in this attempt, for the phases it has been in."""
    raw = memory[offset : offset + TALLIES_BYTES]
    tallies = {}
    for index, phase in enumerate(Phase):
        (first,) = _DOUBLE.unpack_from(raw, _COUNTS_BYTES + index * 8)
        if not first:
            continue
        tallies[phase] = Durations(
            counts=struct.unpack_from(f"<{BUCKETS}I", raw, index * BUCKETS * 4),
            first_seconds=first,
            max_seconds=_DOUBLE.unpack_from(raw, _COUNTS_BYTES + _PHASES * 8 + index * 8)[0],
        )
    return tallies
