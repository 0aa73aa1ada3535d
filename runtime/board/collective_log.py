"""Collective log in a rank's slot: a ring of the collectives that the rank issued from Python.

Torch's Flight Recorder records every collective, but no source line, and its records are lost when the
process dies. The collective log has the source line, the step and whether a thread is blocked, and outlives
the rank. `runtime.rank.collective_recorder` writes it; the hang detector reads it. An entry's number is
written last, so that a reader never accepts an entry that is being written. Does not judge.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass

from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective, CollectiveProgress, operation_name
from grpo_run.watchdog.verdict import Location

ENTRY_BYTES = 256
ENTRIES = 238
LOG_BYTES = ENTRIES * ENTRY_BYTES

_NUMBER = struct.Struct("<Q")
_LAST = struct.Struct("<QQ")  # number of the last entry, its time (ns)
# number, sequence, step, progress, flags, detail, line, members, thread
_HEADER = struct.Struct("<QIiBBHIQQ")
GROUP_BYTES = 40
_TEXTS = struct.Struct(f"<{GROUP_BYTES}s32s24s32s64s24s")  # group, operation, dtypes, sizes, file, function
_ENTRY = struct.Struct(_HEADER.format + _TEXTS.format.removeprefix("<"))
_WRITTEN = struct.Struct(f"{_HEADER.format}{_TEXTS.size}s")  # an entry whose texts are encoded already
assert _ENTRY.size == _WRITTEN.size == _HEADER.size + _TEXTS.size == ENTRY_BYTES
_SEQUENCE = struct.Struct("<I")
_SEQUENCE_AT = 8
_PROGRESS_AT = 16
_FLAGS_AT = 17
_DETAIL_AT = 18
_THREAD_AT = 32
_OPERATION_AT = _HEADER.size + GROUP_BYTES
_BACKWARD = BACKWARD.encode() + b"\0"
_POINT_TO_POINT = 1
_ON_DEVICE = 2
_LIMITED = 4
_VOID = 8
_IN_MEMORY = 16
_DETAIL = struct.Struct("<H")
ROOTED_OPERATIONS = frozenset({"broadcast", "reduce"})
"""Operations whose entries have their root plus one as detail; that of others is how many collectives the
entry stands for, or 0 for one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The part of an entry that is the same for every collective of one source line, encoded once."""

    texts: bytes
    line: int


def describe(
    *, group: str, operation: str, sizes: str, dtypes: str, file: str, line: int, function: str
) -> Description:
    """Encode the constant part of an entry.

    Args:
        sizes: sizes of the inputs: `2,3;7` for two tensors.
        dtypes: dtypes of the inputs, separated by `;`.
    """
    texts = _TEXTS.pack(
        group.encode()[:GROUP_BYTES],
        operation.encode()[:32],
        _if_it_fits(dtypes, 24),
        _if_it_fits(sizes, 32),
        file.encode(errors="replace")[-64:],
        function.encode(errors="replace")[:24],
    )
    return Description(texts=texts, line=line)


class CollectiveLogWriter:
    """Writer of one slot's collective log. Threads may share it.

    Args:
        memory: the board's mapping.
        offset: where the slot's log begins.
        last_at: where the number and the time of the last entry are stored, so that a reader detects new
            entries without the log.
    """

    def __init__(self, memory: mmap.mmap, offset: int, last_at: int) -> None:
        self._memory = memory
        self._offset = offset
        self._last_at = last_at
        self._number = 0
        # a signal handler may issue a collective while an entry is being written
        self._lock = threading.RLock()

    def add(
        self,
        description: Description,
        *,
        sequence: int,
        step: int,
        members: int = 0,
        root: int = -1,
        point_to_point: bool = False,
        on_device: bool = False,
        limited: bool = False,
        in_memory: bool = False,
    ) -> int:
        """Write one entry and return its number, for `mark`.

        Args:
            description: what the collective has in common with every other one of its source line.
            members: one bit per global rank of the group; 0 if unknown.
            root: global rank of a broadcast's source or a reduction's destination; -1 for other operations.
            point_to_point: the sequence number cannot be compared with other ranks'.
            on_device: the collective runs on a device, so the host does not see when it completes.
            limited: the script has given the collective a time limit of its own.
            in_memory: the collective travels through the board, and torch does not know it.
        """
        flags = (
            point_to_point * _POINT_TO_POINT
            | on_device * _ON_DEVICE
            | limited * _LIMITED
            | in_memory * _IN_MEMORY
        )
        memory, thread = self._memory, threading.get_ident()
        with self._lock:
            self._number = number = self._number + 1
            at = self._offset + (number - 1) % ENTRIES * ENTRY_BYTES
            # 0 clears the number first: no reader accepts the entry while it is written
            _WRITTEN.pack_into(
                memory, at, 0, sequence & 0xFFFFFFFF, step, CollectiveProgress.enqueued, flags, root + 1,
                description.line, members, thread, description.texts,
            )  # fmt: skip
            _NUMBER.pack_into(memory, at, number)
            _LAST.pack_into(memory, self._last_at, number, time.monotonic_ns())
        return number

    def mark(self, number: int, progress: CollectiveProgress) -> None:
        """Set the progress of an entry; one that becomes `waiting` gets the calling thread as its thread.

        Ignore an entry that was overwritten.
        """
        if self._number - number < ENTRIES:
            at = self._offset + (number - 1) % ENTRIES * ENTRY_BYTES
            if progress is CollectiveProgress.waiting:
                _NUMBER.pack_into(self._memory, at + _THREAD_AT, threading.get_ident())
            self._memory[at + _PROGRESS_AT] = progress

    def amend(self, number: int, *, count: int) -> None:
        """Set how many collectives an entry stands for, once that is known; 0 if nothing was issued.

        Ignore an entry that was overwritten.
        """
        at = _entry_at(self._offset, number)
        if _NUMBER.unpack_from(self._memory, at)[0] != number:
            return
        if count == 0:
            self._memory[at + _FLAGS_AT] |= _VOID
        else:
            _DETAIL.pack_into(self._memory, at + _DETAIL_AT, min(count, 0xFFFF))

    def exclude(self, number: int) -> None:
        """Mark the sequence number of an entry as not comparable with other ranks'.

        Ignore an entry that was overwritten.
        """
        at = _entry_at(self._offset, number)
        if _NUMBER.unpack_from(self._memory, at)[0] == number:
            self._memory[at + _FLAGS_AT] |= _POINT_TO_POINT

    def detach(self, private: mmap.mmap) -> None:
        """Write to `private` from now on.

        Replaces the lock, which another thread may have held during the fork.
        """
        self._memory, self._lock = private, threading.RLock()


def _entry_at(offset: int, number: int) -> int:
    """Where an entry of the log at `offset` is, also an overwritten one. `add` and `mark` save the call."""
    return offset + (number - 1) % ENTRIES * ENTRY_BYTES


def _if_it_fits(text: str, size_bytes: int) -> bytes:
    """The encoded text, or nothing: a truncated list would compare unequal to the full one."""
    raw = text.encode()
    return raw if len(raw) <= size_bytes else b""


def is_blocked(log: bytes) -> bool:
    """Whether a thread of the rank is blocked in any collective of a copied log. Does not decode the
    entries.
    """
    return CollectiveProgress.waiting in log[_PROGRESS_AT::ENTRY_BYTES]


def may_be_in_collective(log: bytes, number: int) -> bool:
    """Whether a thread of the rank is blocked in a collective, or its last one runs on a device.

    Args:
        log: a copy of the log.
        number: number of the rank's last entry; 0 if there is none.
    """
    return is_blocked(log) or bool(number and log[_entry_at(0, number) + _FLAGS_AT] & _ON_DEVICE)


def is_in_backward(log: bytes, number: int) -> bool:
    """Whether the rank's last entry is that of a DDP backward pass which has not ended.

    Args:
        log: a copy of the log.
        number: number of the rank's last entry; 0 if there is none.
    """
    at = _entry_at(0, number)
    return bool(
        number
        and log.startswith(_BACKWARD, at + _OPERATION_AT)
        and log[at + _PROGRESS_AT] != CollectiveProgress.completed
    )


def read_collective_log(log: bytes, again: bytes) -> tuple[Collective, ...]:
    """Return the entries of one slot's log, oldest first.

    Args:
        log: a copy of the log.
        again: a later copy: an entry whose number differs was overwritten while it was copied, and is left
            out.
    """
    return _read_entries(log, again, range(ENTRIES))


def read_current_collectives(log: bytes, again: bytes, number: int) -> tuple[Collective, ...]:
    """Return the entries of one slot's log in which a thread is blocked, oldest first.

    Without any, the last entry if it runs on a device.

    Args:
        log: a copy of the log.
        again: a later copy, see `read_collective_log`.
        number: number of the rank's last entry; 0 if there is none.
    """
    progress = log[_PROGRESS_AT::ENTRY_BYTES]
    current = []
    index = progress.find(CollectiveProgress.waiting)
    while index >= 0:
        current.append(index)
        index = progress.find(CollectiveProgress.waiting, index + 1)
    if not current and may_be_in_collective(log, number):
        current = [(number - 1) % ENTRIES]
    return _read_entries(log, again, current)


def last_sequence(log: bytes, number: int, group: str) -> int:
    """Return the sequence number of the newest entry of a group in one slot's log; 0 if there is none.

    Args:
        log: a copy of the log.
        number: number of the rank's last entry; 0 if there is none.
    """
    name = group.encode()[:GROUP_BYTES].ljust(GROUP_BYTES, b"\0")
    for index in range(number, max(0, number - ENTRIES), -1):
        at = _entry_at(0, index)
        if log.startswith(name, at + _HEADER.size):
            return int(_SEQUENCE.unpack_from(log, at + _SEQUENCE_AT)[0])
    return 0


def _read_entries(log: bytes, again: bytes, indices: Iterable[int]) -> tuple[Collective, ...]:
    entries = []
    for index in indices:
        fields = _ENTRY.unpack_from(log, index * ENTRY_BYTES)
        if fields[0] and fields[0] == _NUMBER.unpack_from(again, index * ENTRY_BYTES)[0]:
            entries.append(fields)
    entries.sort()
    return tuple(_decode(fields) for fields in entries)


@functools.lru_cache(maxsize=512)  # ranks that wait are asked several times a second, and wait for the same
def _decode(fields: tuple[int | bytes, ...]) -> Collective:
    (
        _, sequence, step, progress, flags, detail, line, members, thread,
        group, raw_operation, dtypes, sizes, file, function,
    ) = fields  # fmt: skip
    operation = operation_name(_text(raw_operation))
    rooted = operation in ROOTED_OPERATIONS
    return Collective(
        group=_text(group),
        sequence=int(sequence),
        operation=operation,
        sizes=_sizes(_text(sizes)),
        dtypes=tuple(dtype for dtype in _text(dtypes).split(";") if dtype),
        progress=CollectiveProgress(int(progress)),
        location=Location(file=_text(file), line=int(line), function=_text(function)) if line else None,
        members=tuple(rank for rank in range(64) if int(members) >> rank & 1),
        root=int(detail) - 1 if rooted else -1,
        step=int(step),
        point_to_point=bool(int(flags) & _POINT_TO_POINT),
        thread=str(thread) if thread else "",
        timeout_seconds=0.0 if int(flags) & _LIMITED else math.inf,
        on_device=bool(int(flags) & _ON_DEVICE),
        in_memory=bool(int(flags) & _IN_MEMORY),
        count=0 if int(flags) & _VOID else 1 if rooted else max(1, int(detail)),
    )


def _sizes(text: str) -> tuple[tuple[int, ...], ...]:
    """Sizes as numbers; empty if any of them is symbolic, as it is during tracing."""
    if not text:
        return ()
    try:
        return tuple(tuple(int(part) for part in size.split(",") if part) for size in text.split(";"))
    except ValueError:
        return ()


def _text(raw: int | bytes) -> str:
    assert isinstance(raw, bytes)
    return raw.rstrip(b"\0").decode(errors="replace")
