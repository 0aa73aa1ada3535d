"""Histograms of a rank's durations: logarithmic counters, the first occurrence and the longest.

Short phases end between two scans of the supervisor, so the rank counts them itself, in about 1 µs per phase.
The histograms of phases are a part of the slot. Those of the user's callbacks are a table that follows all
slots, with a named entry (`MyCallback.on_step_end`) for each class and event. A callback gets its entry when
it is entered for the first time; once the table is full, all further ones share the last entry. Written by
`slot_writer.py`, read by `board.py`. Does not decide how long is too long (`watchdog.stalls.deadlines`).
"""

from __future__ import annotations

import mmap
import struct

from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.durations import BUCKETS, Durations, bucket_of

PHASES = tuple(phase for phase in Phase if phase is not Phase.callback)
"""Phases with a histogram here. Callbacks are measured by name."""
_PHASES = len(PHASES)
_COUNTS_BYTES = _PHASES * BUCKETS * 4
_DOUBLE = struct.Struct("<d")
_COUNT = struct.Struct("<I")
HISTOGRAMS_BYTES = _COUNTS_BYTES + 2 * _PHASES * 8
_SHORTEST_FIRST_SECONDS = 1e-9
"""Stored for a first occurrence of zero length: a stored 0 means that none has ended."""


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


ENTRIES = 32
NAME_BYTES = 48
OTHERS = "other callbacks"
"""Name of the last entry, which callbacks share for which no entry is left."""
_ENTRY = struct.Struct(f"<{NAME_BYTES}sdd{BUCKETS}I")  # name, first, longest, counts
_FIRST_AT = NAME_BYTES
_LONGEST_AT = NAME_BYTES + 8
_COUNTS_AT = NAME_BYTES + 16
CALLBACKS_BYTES = ENTRIES * _ENTRY.size


class CallbackTableWriter:
    """Writer of one rank's table.

    Args:
        memory: the board's mapping.
        offset: where the table begins; it is zeroed.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        memory[offset : offset + CALLBACKS_BYTES] = bytes(CALLBACKS_BYTES)
        self._memory = memory
        self._offset = offset
        self._numbers: dict[str, int] = {}
        self._durations: dict[int, tuple[list[int], float]] = {}

    def number_of(self, name: str) -> int:
        """Return the number of a callback's entry, counted from 1."""
        number = self._numbers.get(name)
        if number is None:
            number = min(len(set(self._numbers.values())) + 1, ENTRIES)
            stored = name if number < ENTRIES else OTHERS
            # the end of a long name holds the event
            self._memory_at(number, 0, stored.encode()[-NAME_BYTES:].ljust(NAME_BYTES, b"\0"))
            self._numbers[name] = number
        return number

    def add(self, number: int, seconds: float) -> None:
        """Count one finished callback. The first occurrence is stored separately."""
        known = self._durations.get(number)
        if known is None:
            self._durations[number] = [0] * BUCKETS, 0.0
            self._memory_at(number, _FIRST_AT, _DOUBLE.pack(max(seconds, _SHORTEST_FIRST_SECONDS)))
            return
        counts, longest = known
        bucket = bucket_of(seconds)
        counts[bucket] += 1
        self._memory_at(number, _COUNTS_AT + 4 * bucket, _COUNT.pack(counts[bucket]))
        if seconds > longest:
            self._durations[number] = counts, seconds
            self._memory_at(number, _LONGEST_AT, _DOUBLE.pack(seconds))

    def detach(self, private: mmap.mmap) -> None:
        """Write to `private` from now on."""
        self._memory = private

    def _memory_at(self, number: int, at: int, content: bytes) -> None:
        begin = self._offset + (number - 1) * _ENTRY.size + at
        self._memory[begin : begin + len(content)] = content


def read_callback_name(table: bytes, number: int) -> str:
    """Return the name of an entry of a copied table; "" if there is no such entry."""
    if not 1 <= number <= ENTRIES:
        return ""
    begin = (number - 1) * _ENTRY.size
    return _text(table[begin : begin + NAME_BYTES])


def read_callback_durations(table: bytes) -> dict[str, Durations]:
    """Return the durations of every callback that has ended at least once in this attempt, by name.

    Args:
        table: a copy of the table.
    """
    found = {}
    for entry in range(ENTRIES):
        name, first, longest, *counts = _ENTRY.unpack_from(table, entry * _ENTRY.size)
        if first:
            found[_text(name)] = Durations(counts=tuple(counts), first_seconds=first, max_seconds=longest)
    return found


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")
