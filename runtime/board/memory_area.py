"""A rank's memory by phase in its part of the board: a header and one entry for each phase.

The last entry is no phase's: it holds the forecast. The areas follow all others. Written by
`runtime.rank.memory`, read by `board.py`. The header begins with a sequence number that is odd during a write
(see `slot_writer.py`). Fields must not move, see `_slot_layout.py`. Does not measure anything.
"""

from __future__ import annotations

import dataclasses
import mmap
import struct

from grpo_run.runtime.board._storage import BoardBytes
from grpo_run.watchdog.memory.phase_memory import MemoryForecast, PhaseMemory, RankMemory
from grpo_run.watchdog.observation import Phase

MAX_PHASES = 24
"""Room for phases that are added later."""
READ_ATTEMPTS = 20

_SEQUENCE = struct.Struct("<Q")
_HEADER = struct.Struct("<15Q")  # the fields of `Totals` in their order
_ENTRY = struct.Struct("<10Q")  # the fields of `PhaseFigures` in their order; the last one is unused
_HEADER_AT = _SEQUENCE.size
_ENTRIES_AT = _HEADER_AT + _HEADER.size
MEMORY_AREA_BYTES = _ENTRIES_AT + MAX_PHASES * _ENTRY.size

_FORECAST_AT = _ENTRIES_AT + (MAX_PHASES - 1) * _ENTRY.size

assert max(Phase) < MAX_PHASES


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class PhaseFigures:
    """What is stored of one phase; see `PhaseMemory`."""

    readings: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    inactive_split_bytes: int = 0
    retries: int = 0
    peak_resident_bytes: int = 0
    resident_bytes: int = 0


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class Totals:
    """What is stored of the rank as a whole; see `RankMemory`."""

    has_device: int = 0
    capacity_bytes: int = 0
    readings: int = 0
    spent_ns: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    inactive_split_bytes: int = 0
    resident_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0
    ooms: int = 0
    released_bytes: int = 0
    freed_bytes: int = 0


@dataclasses.dataclass(kw_only=True, slots=True, eq=False)
class ForecastFigures:
    """What is stored of the forecast; see `MemoryForecast`."""

    predicted_bytes: int = 0
    observed_bytes: int = 0
    limit_bytes: int = 0
    pieces: int = 0
    rollouts: int = 0
    split_rollouts: int = 0


class MemoryAreaWriter:
    """The only writer of one rank's area. One thread of a rank uses it at a time; it never blocks.

    Set the attributes of `totals`, `phases` and `forecast`, then call `publish`.

    Args:
        memory: the board's writable mapping.
        offset: where the area begins; it is zeroed.
    """

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        self.totals = Totals()
        self.phases: dict[Phase, PhaseFigures] = {}
        self.forecast = ForecastFigures()
        self._memory = memory
        self._offset = offset
        self._sequence = 0
        memory[offset : offset + MEMORY_AREA_BYTES] = bytes(MEMORY_AREA_BYTES)

    def figures(self, phase: Phase) -> PhaseFigures:
        """Return the figures of a phase, to be changed in place."""
        found = self.phases.get(phase)
        if found is None:
            found = self.phases[phase] = PhaseFigures()
        return found

    def publish(self, phase: Phase | None = None) -> None:
        """Write the totals, and the figures of a phase that have changed."""
        memory, offset, own = self._memory, self._offset, self.totals
        # odd during the write, also if an exception from a signal handler left it odd
        self._sequence += 1 + (self._sequence & 1)
        _SEQUENCE.pack_into(memory, offset, self._sequence)
        _HEADER.pack_into(
            memory, offset + _HEADER_AT, own.has_device, own.capacity_bytes, own.readings, own.spent_ns,
            own.allocated_bytes, own.reserved_bytes, own.inactive_split_bytes, own.resident_bytes,
            own.peak_allocated_bytes, own.peak_reserved_bytes, own.retries, own.ooms, own.released_bytes,
            own.freed_bytes, 0,
        )  # fmt: skip
        if phase is not None:
            one = self.phases[phase]
            _ENTRY.pack_into(
                memory, offset + _ENTRIES_AT + (phase - 1) * _ENTRY.size, one.readings,
                one.peak_allocated_bytes,
                one.peak_reserved_bytes, one.allocated_bytes, one.reserved_bytes, one.inactive_split_bytes,
                one.retries, one.peak_resident_bytes, one.resident_bytes, 0,
            )  # fmt: skip
        foreseen = self.forecast
        if foreseen.rollouts:
            _ENTRY.pack_into(
                memory, offset + _FORECAST_AT, foreseen.predicted_bytes, foreseen.observed_bytes,
                foreseen.limit_bytes,
                foreseen.pieces, foreseen.rollouts, foreseen.split_rollouts, 0, 0, 0, 0,
            )  # fmt: skip
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
    *fields, _ = _HEADER.unpack_from(raw, _HEADER_AT)
    totals = Totals(**dict(zip(Totals.__slots__, fields, strict=True)))
    phases = {}
    for phase in Phase:
        *values, _ = _ENTRY.unpack_from(raw, _ENTRIES_AT + (phase - 1) * _ENTRY.size)
        if any(values):
            phases[phase] = PhaseMemory(**dict(zip(PhaseFigures.__slots__, values, strict=True)))
    figures = dict(zip(ForecastFigures.__slots__, _ENTRY.unpack_from(raw, _FORECAST_AT), strict=False))
    return RankMemory(
        has_device=bool(totals.has_device),
        capacity_bytes=totals.capacity_bytes,
        readings=totals.readings,
        spent_seconds=totals.spent_ns / 1e9,
        allocated_bytes=totals.allocated_bytes,
        reserved_bytes=totals.reserved_bytes,
        inactive_split_bytes=totals.inactive_split_bytes,
        resident_bytes=totals.resident_bytes,
        peak_allocated_bytes=totals.peak_allocated_bytes,
        peak_reserved_bytes=totals.peak_reserved_bytes,
        retries=totals.retries,
        ooms=totals.ooms,
        released_bytes=totals.released_bytes,
        freed_bytes=totals.freed_bytes,
        phases=phases,
        forecast=MemoryForecast(**figures) if figures["rollouts"] else None,
    )
