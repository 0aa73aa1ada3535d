"""A rank's notes of the collectives it issued from Python: a ring in its slot, readable after its death.

Torch's Flight Recorder knows every collective but no line of code, and dies with the process. The notes know the
line, the step and whether the thread is blocked. `trainers.rank.recorder` writes them, the supervisor's watch reads
them. A note is written whole before its number, so a reader never takes half a one. Does not judge.
"""

from __future__ import annotations

import mmap
import struct
import threading

from grpo_run.watchdog.deadlocks.collectives import Collective, Progress, operation_name
from grpo_run.watchdog.verdict import Location

NOTE_BYTES = 256
NOTES = 238
RING_BYTES = NOTES * NOTE_BYTES

_NUMBER = struct.Struct("<Q")
_NOTE = struct.Struct("<QIiBBHIQQ40s32s24s32s64s24s")
assert _NOTE.size == NOTE_BYTES
_PROGRESS_AT = 16
_FLAGS_AT = 17
_WAITER_AT = 32
_POINT_TO_POINT = 1
_ON_DEVICE = 2


class NoteWriter:
    """Appends notes to one slot's ring. Threads may share it.

    Args:
        memory: the board's mapping.
        offset: where the slot's ring begins.
        number_at: where the number of the last note goes, so that a reader sees movement without the ring.
    """

    def __init__(self, memory: mmap.mmap, offset: int, number_at: int) -> None:
        self._memory = memory
        self._offset = offset
        self._number_at = number_at
        self._number = 0
        self._lock = threading.RLock()  # a signal handler may issue a collective in the middle of a note

    def add(
        self,
        *,
        group: str,
        sequence: int,
        operation: str,
        sizes: str,
        dtypes: str,
        file: str,
        line: int,
        function: str,
        step: int,
        members: int = 0,
        point_to_point: bool = False,
        on_device: bool = False,
        progress: Progress = Progress.enqueued,
    ) -> int:
        """Write one note; returns its number, for `mark`.

        Args:
            sizes: of the inputs, `2,3;7` for two tensors; `dtypes` with `;` between.
            members: a bit for each global rank of the group, 0 where not known.
            on_device: the host does not see when it completes.
        """
        with self._lock:
            self._number += 1
            number = self._number
            at = self._offset + (number - 1) % NOTES * NOTE_BYTES
            _NUMBER.pack_into(self._memory, at, 0)
            _NOTE.pack_into(
                self._memory,
                at,
                0,
                sequence & 0xFFFFFFFF,
                step,
                progress,
                (_POINT_TO_POINT if point_to_point else 0) | (_ON_DEVICE if on_device else 0),
                0,
                line,
                members,
                0,
                group.encode()[:40],
                operation.encode()[:32],
                _whole(dtypes, 24),
                _whole(sizes, 32),
                file.encode(errors="replace")[-64:],
                function.encode(errors="replace")[:24],
            )
            _NUMBER.pack_into(self._memory, at, number)
            _NUMBER.pack_into(self._memory, self._number_at, self._number)
        return number

    def disown(self, nowhere: mmap.mmap) -> None:
        """Write to `nowhere`; a fork may have copied a lock that another thread held."""
        self._memory, self._lock = nowhere, threading.RLock()

    def mark(self, number: int, progress: Progress) -> None:
        """Say how far the collective of a note is, and by which thread; one the ring has overwritten is left alone."""
        at = self._offset + (number - 1) % NOTES * NOTE_BYTES
        if _NUMBER.unpack_from(self._memory, at)[0] == number:
            _NUMBER.pack_into(self._memory, at + _WAITER_AT, threading.get_ident())
            self._memory[at + _PROGRESS_AT] = progress


def _whole(text: str, room: int) -> bytes:
    """What does not fit is left out: part of it would compare unequal to the whole."""
    raw = text.encode()
    return raw if len(raw) <= room else b""


def blocked(memory: mmap.mmap, offset: int) -> bool:
    """Whether a thread of the rank waits for a collective, perhaps not its newest; without reading the notes."""
    return Progress.waiting in memory[offset + _PROGRESS_AT : offset + RING_BYTES : NOTE_BYTES]


def in_collective(memory: mmap.mmap, offset: int, number: int) -> bool:
    """Whether a thread of the rank waits for a collective, or its last one runs on a device, where only torch knows.

    Args:
        number: of the rank's last note.
    """
    if blocked(memory, offset):
        return True
    at = offset + (number - 1) % NOTES * NOTE_BYTES
    return bool(number and memory[at + _FLAGS_AT] & _ON_DEVICE)


def read_notes(memory: mmap.mmap, offset: int) -> tuple[Collective, ...]:
    """The notes of one slot, oldest first."""
    raw = memory[offset : offset + RING_BYTES]
    found = []
    for index in range(NOTES):
        fields = _NOTE.unpack_from(raw, index * NOTE_BYTES)
        if fields[0] and fields[0] == _NUMBER.unpack_from(memory, offset + index * NOTE_BYTES)[0]:
            found.append(fields)
    found.sort()
    return tuple(_decode(fields) for fields in found)


def _decode(fields: tuple[int | bytes, ...]) -> Collective:
    (
        _,
        sequence,
        step,
        progress,
        flags,
        _,
        line,
        members,
        waiter,
        group,
        operation,
        dtypes,
        sizes,
        file,
        function,
    ) = fields
    return Collective(
        group=_text(group),
        sequence=int(sequence),
        operation=operation_name(_text(operation)),
        sizes=_sizes(_text(sizes)),
        dtypes=tuple(one for one in _text(dtypes).split(";") if one),
        progress=Progress(int(progress)),
        location=Location(file=_text(file), line=int(line), function=_text(function)) if line else None,
        members=tuple(rank for rank in range(64) if int(members) >> rank & 1),
        step=int(step),
        point_to_point=bool(int(flags) & _POINT_TO_POINT),
        waiter=str(waiter) if waiter and progress == Progress.waiting else "",
    )


def _sizes(text: str) -> tuple[tuple[int, ...], ...]:
    """Sizes in numbers; none where one is a symbol, as under a tracer."""
    if not text:
        return ()
    try:
        return tuple(tuple(int(part) for part in one.split(",") if part) for one in text.split(";"))
    except ValueError:
        return ()


def _text(raw: int | bytes) -> str:
    assert isinstance(raw, bytes)
    return raw.rstrip(b"\0").decode(errors="replace")
