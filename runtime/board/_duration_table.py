"""A rank's table of durations: a histogram, the first occurrence and the longest of each phase and callback.

Short phases end between two scans of the supervisor, so the rank counts them itself, in about 1 µs per phase.
Their sum is stored too, for histograms that are exported.
The tables follow all slots. The first entries are those of the phases, by their value. The others belong to
the user's callbacks, one named entry (`MyCallback.on_step_end`) for each class and event. A callback gets its
entry when it is entered for the first time; once the table is full, all further ones share the last entry.
Written by `slot_writer.py`, read by `board.py`. Does not decide how long is too long
(`watchdog.stalls.deadlines`).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator

from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.durations import BUCKETS, Durations, Histogram, bucket_of

LAST_PHASE = Phase.callback - 1
"""The last entry of a phase. Callbacks are measured by name."""
assert max(Phase) == Phase.callback
CALLBACKS = 35
ENTRIES = LAST_PHASE + CALLBACKS
NAME_BYTES = 48
OTHERS = "other callbacks"
"""Name of the last entry, which callbacks share for which no entry is left."""
_ENTRY = struct.Struct(f"<{NAME_BYTES}sddd{BUCKETS}I")  # name, first, longest, sum, counts
_FIRST_AT = NAME_BYTES
_LONGEST_AT = NAME_BYTES + 8
_SUM_AT = NAME_BYTES + 16
_COUNTS_AT = NAME_BYTES + 24
_DOUBLE = struct.Struct("<d")
_COUNT = struct.Struct("<I")
TABLE_BYTES = ENTRIES * _ENTRY.size
_SHORTEST_FIRST_SECONDS = 1e-9
"""Stored for a first occurrence of zero length: a stored 0 means that none has ended."""


class DurationTableWriter:
    """Writer of one rank's table.

    Args:
        memory: the board's mapping.
        offset: where the table begins; it is zeroed.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        memory[offset : offset + TABLE_BYTES] = bytes(TABLE_BYTES)
        self._memory = memory
        self._offset = offset
        self._numbers: dict[str, int] = {}
        self._counts: list[list[int] | None] = [None] * (ENTRIES + 1)
        self._longest = [0.0] * (ENTRIES + 1)
        self._sums = [0.0] * (ENTRIES + 1)

    def number_of(self, callback: str) -> int:
        """Return the number of a callback's entry; that of a phase is its value."""
        number = self._numbers.get(callback)
        if number is None:
            number = min(LAST_PHASE + 1 + len(self._numbers), ENTRIES)
            stored = callback if number < ENTRIES else OTHERS
            at = self._entry_at(number)
            # the end of a long name holds the event
            name = stored.encode()[-NAME_BYTES:].ljust(NAME_BYTES, b"\0")
            self._memory[at : at + NAME_BYTES] = name
            self._numbers[callback] = number
        return number

    def add(self, number: int, seconds: float) -> None:
        """Count one finished phase or callback. The first occurrence is stored separately."""
        at = self._entry_at(number)
        self._sums[number] += seconds
        _DOUBLE.pack_into(self._memory, at + _SUM_AT, self._sums[number])
        counts = self._counts[number]
        if counts is None:
            self._counts[number] = [0] * BUCKETS
            _DOUBLE.pack_into(self._memory, at + _FIRST_AT, max(seconds, _SHORTEST_FIRST_SECONDS))
            return
        bucket = bucket_of(seconds)
        counts[bucket] += 1
        _COUNT.pack_into(self._memory, at + _COUNTS_AT + 4 * bucket, counts[bucket])
        if seconds > self._longest[number]:
            self._longest[number] = seconds
            _DOUBLE.pack_into(self._memory, at + _LONGEST_AT, seconds)

    def detach(self, private: mmap.mmap) -> None:
        """Write to `private` from now on."""
        self._memory = private

    def _entry_at(self, number: int) -> int:
        return self._offset + (number - 1) * _ENTRY.size


def read_callback_name(table: bytes, number: int) -> str:
    """Return the name of an entry of a copied table; "" if there is no such entry."""
    begin = (number - 1) * _ENTRY.size
    return _text(table[begin : begin + NAME_BYTES])


def read_durations(table: bytes) -> dict[PhaseKey, Durations]:
    """Return the durations of every phase and callback that has ended at least once in this attempt.

    Args:
        table: a copy of the table.
    """
    found: dict[PhaseKey, Durations] = {}
    for number, name, first, longest, _, counts in _ended(table):
        key = Phase(number) if number <= LAST_PHASE else _text(name)
        found[key] = Durations(counts=tuple(counts), first_seconds=first, max_seconds=longest)
    return found


def read_histograms(table: bytes) -> dict[Phase, Histogram]:
    """Return the durations of every phase that has ended in this attempt; callbacks are one phase.

    Args:
        table: a copy of the table.
    """
    found: dict[Phase, Histogram] = {}
    for number, _, first, _, total, counts in _ended(table):
        counts[bucket_of(first)] += 1
        phase = Phase(min(number, Phase.callback))
        one = Histogram.of_buckets(counts, total)
        found[phase] = found[phase] + one if phase in found else one
    return found


def _ended(table: bytes) -> Iterator[tuple[int, bytes, float, float, float, list[int]]]:
    """Yield number, name, first and longest duration, sum and counts of each entry that has ended once."""
    for number in range(1, ENTRIES + 1):
        begin = (number - 1) * _ENTRY.size
        if _DOUBLE.unpack_from(table, begin + _FIRST_AT)[0]:  # most entries are empty
            name, first, longest, total, *counts = _ENTRY.unpack_from(table, begin)
            yield number, name, first, longest, total, counts


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="ignore")
