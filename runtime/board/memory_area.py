"""A rank's memory by phase in its part of the board: a header and one entry for each phase.

The areas follow all others. Written by `runtime.rank.memory`, read by `board.py`. The header begins with a
sequence number that is odd during a write (see `slot_writer.py`). Fields must not move, see
`_slot_layout.py`. Does not measure anything.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import fields
from operator import attrgetter
from typing import Any

from grpo_run.runtime.board._storage import BoardBytes
from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.observation import Phase

MAX_PHASES = 24
"""Room for phases that are added later."""
READ_ATTEMPTS = 20

_TOTALS = tuple(field.name for field in fields(RankMemory) if field.name != "phases")
_PHASE = tuple(field.name for field in fields(PhaseMemory))
_SEQUENCE = struct.Struct("<Q")
_HEADER = struct.Struct(f"<{len(_TOTALS)}Q8x")
_ENTRY = struct.Struct(f"<{len(_PHASE)}Q8x")
_HEADER_AT = _SEQUENCE.size
_ENTRIES_AT = _HEADER_AT + _HEADER.size
MEMORY_AREA_BYTES = _ENTRIES_AT + MAX_PHASES * _ENTRY.size
_totals_of, _phase_of = (attrgetter(*names) for names in (_TOTALS, _PHASE))

assert max(Phase) < MAX_PHASES


class MemoryAreaWriter:
    """The only writer of one rank's area. One thread of a rank uses it at a time; it never blocks.

    Set the attributes of `totals` and of its phases, then call `publish`.

    Args:
        memory: the board's writable mapping.
        offset: where the area begins; it is zeroed.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.totals = RankMemory()
        self._memory = memory
        self._offset = offset
        self._sequence = 0
        memory[offset : offset + MEMORY_AREA_BYTES] = bytes(MEMORY_AREA_BYTES)

    def figures(self, phase: Phase) -> PhaseMemory:
        """Return the figures of a phase, to be changed in place."""
        return self.totals.phases.setdefault(phase, PhaseMemory())

    def publish(self, phase: Phase | None = None) -> None:
        """Write the totals, and the figures of a phase that have changed."""
        memory, offset = self._memory, self._offset
        # odd during the write, also if an exception from a signal handler left it odd
        self._sequence += 1 + (self._sequence & 1)
        _SEQUENCE.pack_into(memory, offset, self._sequence)
        _HEADER.pack_into(memory, offset + _HEADER_AT, *_totals_of(self.totals))
        if phase is not None:
            at = offset + _ENTRIES_AT + (phase - 1) * _ENTRY.size
            _ENTRY.pack_into(memory, at, *_phase_of(self.totals.phases[phase]))
        self._sequence += 1
        _SEQUENCE.pack_into(memory, offset, self._sequence)

    def detach(self, private: mmap.mmap) -> None:
        """Write to `private` from now on."""
        self._memory = private


def read_memory_area(contents: BoardBytes, offset: int) -> RankMemory | None:
    """Return one consistent reading of an area; None if nothing was written, or a write never ended.

    Args:
        contents: the bytes of the board.
        offset: where the area begins.
    """
    for _ in range(READ_ATTEMPTS):
        (before,) = _SEQUENCE.unpack(contents.read(offset, _SEQUENCE.size))
        raw = contents.read(offset, MEMORY_AREA_BYTES)
        (after,) = _SEQUENCE.unpack(contents.read(offset, _SEQUENCE.size))
        if before == 0:
            return None
        if before == after and before % 2 == 0:
            return _decode(raw)
    return None


def _decode(raw: bytes) -> RankMemory:
    totals: dict[str, Any] = dict(zip(_TOTALS, _HEADER.unpack_from(raw, _HEADER_AT), strict=True))
    totals["has_device"] = bool(totals["has_device"])
    memory = RankMemory(**totals)
    for phase in Phase:
        values = _ENTRY.unpack_from(raw, _ENTRIES_AT + (phase - 1) * _ENTRY.size)
        if any(values):
            memory.phases[phase] = PhaseMemory(**dict(zip(_PHASE, values, strict=True)))
    return memory
