"""Layout of a slot: where everything that a rank publishes is, and the structs that pack and unpack it.

       0    sequence number (seqlock)
       8    identity
      32    the step with which the rank's data ended
      64    open phases
     256    integer fields
     344    marks: heartbeat, last work, collectives, forward passes of generation
     384    floating-point fields
     512    threads that wake no other thread
     576    what was logged
    1024    collective log

To add a field, append it to `watchdog.observation.SlotFields`, and an integer's format to `INTEGERS`: the
writer (`slot_writer.py`) and `read_slot` derive from them. What a Trainer or a script logs is added in
`watchdog/rank_metrics.py` alone. Does not read or write the board itself.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import mmap
import struct
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.board._duration_table import LAST_PHASE
from grpo_run.runtime.board.collective_log import LOG_BYTES
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot, SlotFields
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS

MAX_OPEN_PHASES = 8

SEQUENCE = struct.Struct("<Q")
IDENTITY = struct.Struct("<IIII")  # rank, local rank, pid, attempt
OPEN_PHASES = struct.Struct(f"<QII{MAX_OPEN_PHASES}I{MAX_OPEN_PHASES}Q")
"""Last progress (ns), state, depth, and of each phase the number in the duration table and the start (ns)."""
MARK = struct.Struct("<Q")
DATA_END = struct.Struct("<I")
MARKS = struct.Struct("<5Q")
"""Heartbeat, last work (ns), collectives issued, time of the last one (ns), forward passes of generation."""
MAX_IDLE_THREADS = 7
THREADS = struct.Struct(f"<{1 + MAX_IDLE_THREADS}Q")  # native ids: of the heartbeat, of idle threads
LOGGED_VALUES = struct.Struct(f"<{len(LOGGED_FIELDS)}d")
NEVER_LOGGED = (math.nan,) * len(LOGGED_FIELDS)

IDENTITY_AT = 8
DATA_END_AT = 32  # an aligned store outside the seqlock
OPEN_PHASES_AT = 64
INTEGERS_AT = 256
HEARTBEAT_AT = 344  # the marks are 8-byte stores outside the seqlock
LAST_WORK_AT = 352
COLLECTIVES_ISSUED_AT = 360  # and the time of the last one
GENERATION_PASSES_AT = 376
FLOATS_AT = 384
THREADS_AT = 512  # written by the heartbeat, outside the seqlock
LOGGED_AT = 576
COLLECTIVE_LOG_AT = 1024
SLOT_BYTES = COLLECTIVE_LOG_AT + LOG_BYTES
READING_BYTES = LOGGED_AT + LOGGED_VALUES.size
"""Size of the part that `read_slot` decodes: everything except the collective log."""

VERSION = struct.Struct(
    f"<Q{HEARTBEAT_AT - SEQUENCE.size}x{MARKS.size}s{THREADS_AT - HEARTBEAT_AT - MARKS.size}x{THREADS.size}s"
)
"""The sequence number, the marks and the threads of a slot: if they are equal, so is the whole slot."""


def _writer_of(layout: struct.Struct, names: tuple[str, ...]) -> Callable[[mmap.mmap, int, SlotFields], None]:
    """Compile a function that packs these fields into memory at an offset.

    `layout.pack_into(memory, at, *attrgetter(*names)(fields))` would take more than twice as long.
    """
    values = ", ".join(f"fields.{name}" for name in names)
    write: Callable[[mmap.mmap, int, SlotFields], None] = eval(
        f"lambda memory, at, fields: pack_into(memory, at, {values})", {"pack_into": layout.pack_into}
    )
    return write


_INTEGER_NAMES = tuple(field.name for field in dataclasses.fields(SlotFields) if field.type == "int")
_FLOAT_NAMES = tuple(field.name for field in dataclasses.fields(SlotFields) if field.type == "float")

INTEGERS = struct.Struct("<7i6QH")
FLOATS = struct.Struct(f"<{len(_FLOAT_NAMES)}d")
write_integers = _writer_of(INTEGERS, _INTEGER_NAMES)
write_floats = _writer_of(FLOATS, _FLOAT_NAMES)

assert OPEN_PHASES_AT + OPEN_PHASES.size <= INTEGERS_AT
assert INTEGERS_AT + INTEGERS.size <= HEARTBEAT_AT
assert HEARTBEAT_AT + MARKS.size <= FLOATS_AT
assert FLOATS_AT + FLOATS.size <= THREADS_AT
assert THREADS_AT + THREADS.size <= LOGGED_AT <= READING_BYTES <= COLLECTIVE_LOG_AT


def read_slot(raw: bytes, sequence: int, callback_name: Callable[[int], str] = lambda number: "") -> Slot:
    """Decode a consistent copy of a slot's first `READING_BYTES` bytes.

    Args:
        callback_name: returns the name of an entry of the rank's callback table.
    """
    rank, local_rank, pid, attempt = IDENTITY.unpack_from(raw, IDENTITY_AT)
    progress_ns, state, depth, *phases = OPEN_PHASES.unpack_from(raw, OPEN_PHASES_AT)
    heartbeat_thread, *idle_threads = THREADS.unpack_from(raw, THREADS_AT)
    return Slot(
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        attempt=attempt,
        state=RankState(state),
        phases=tuple(
            _open_phase(phases[i], phases[MAX_OPEN_PHASES + i], callback_name) for i in range(depth)
        ),
        last_progress_seconds=progress_ns / 1e9,
        writes=sequence // 2,
        heartbeat_thread=heartbeat_thread,
        idle_threads=tuple(thread for thread in idle_threads if thread),
        logged=LOGGED_VALUES.unpack_from(raw, LOGGED_AT),
        **_marks(raw),
        **dict(zip(_INTEGER_NAMES, INTEGERS.unpack_from(raw, INTEGERS_AT), strict=True)),
        **dict(zip(_FLOAT_NAMES, FLOATS.unpack_from(raw, FLOATS_AT), strict=True)),
    )


def _open_phase(number: int, since_ns: int, callback_name: Callable[[int], str]) -> OpenPhase:
    if number > LAST_PHASE:
        return OpenPhase(phase=Phase.callback, since_seconds=since_ns / 1e9, callback=callback_name(number))
    return _plain_phase(number, since_ns)


@functools.lru_cache(maxsize=1024)
def _plain_phase(number: int, since_ns: int) -> OpenPhase:
    """One object for each open phase: most of them are the same in the next reading."""
    return OpenPhase(phase=Phase(number), since_seconds=since_ns / 1e9)


def with_marks(reading: Slot, raw: bytes) -> Slot:
    """Return an earlier reading with the marks of a copy of the slot: they are stored outside the seqlock."""
    return dataclasses.replace(reading, **_marks(raw))


def _marks(raw: bytes) -> dict[str, Any]:
    heartbeat_ns, last_work_ns, collectives, last_collective_ns, passes = MARKS.unpack_from(raw, HEARTBEAT_AT)
    return {
        "heartbeat_seconds": heartbeat_ns / 1e9,
        "last_work_seconds": last_work_ns / 1e9,
        "collectives_issued": collectives,
        "last_collective_seconds": last_collective_ns / 1e9,
        "generation_passes": passes,
    }
