"""Durations of the user's callbacks in a rank's part of the board: one entry for each class and event.

An entry is a name (`MyCallback.on_step_end`), a histogram, the first occurrence and the longest. A callback gets its
entry when it is entered for the first time; once the table is full, all further ones share the last entry. The
tables follow all slots, and a board of an earlier version has none. Written by `slot_writer.py`, read by `board.py`.
Does not decide how long is too long (`watchdog.stalls.deadlines`).
"""

from __future__ import annotations

import mmap
import struct

from grpo_run.watchdog.stalls.durations import BUCKETS, Durations, bucket_of

ENTRIES = 32
NAME_BYTES = 48
OTHERS = "other callbacks"
"""Name of the last entry, which callbacks share for which no entry is left."""
_ENTRY = struct.Struct(f"<{NAME_BYTES}sdd{BUCKETS}I")  # name, first, longest, counts
_FIRST_AT = NAME_BYTES
_LONGEST_AT = NAME_BYTES + 8
_COUNTS_AT = NAME_BYTES + 16
_DOUBLE = struct.Struct("<d")
_COUNT = struct.Struct("<I")
CALLBACKS_BYTES = ENTRIES * _ENTRY.size
_SHORTEST_FIRST_SECONDS = 1e-9
"""Stored for a first occurrence of zero length: a stored 0 means that the callback never ended."""


class CallbackTableWriter:
    """Writer of one rank's table.

    Args:
        memory: the board's mapping.
        offset: where the table begins; zeroed. None on a board without tables.
    """

    def __init__(self, memory: mmap.mmap, offset: int | None) -> None:
        self._memory = memory
        self._offset = offset
        self._numbers: dict[str, int] = {}
        self._durations: dict[int, tuple[list[int], float]] = {}

    def number_of(self, name: str) -> int:
        """Return the number of a callback's entry, counted from 1; 0 on a board without tables."""
        if self._offset is None:
            return 0
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
        assert self._offset is not None
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
