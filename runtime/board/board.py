"""The board file: a header, and for each local rank a slot, a callback table, an exchange area and a memory area.

Memory-mapped, and readable after a rank's death. The supervisor creates and reads it; each rank writes its own slot
(`slot_writer.py`) and the messages that it sends to the others (`exchange.py`). A reader that sees an
odd or changed sequence number reads again, and then returns its last consistent reading: a writer may be
interrupted in the middle of a write for any time (by garbage collection, by another thread of its
interpreter, by the kernel). This relies on the stores of one x86-64 thread becoming visible in
order; under a weaker memory model a torn reading is still detected unless every field tore in the same way.
Does not interpret slots and does not notify: readers poll.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from grpo_run.runtime.board.accounting.memory_area import MEMORY_AREA_BYTES, read_memory_area
from grpo_run.runtime.board.awaited_field import read_awaited, write_awaited
from grpo_run.runtime.board.callback_table import (
    CALLBACKS_BYTES,
    read_callback_durations,
    read_callback_name,
)
from grpo_run.runtime.board.collective_log import (
    LOG_BYTES,
    is_blocked,
    is_in_backward,
    last_sequence,
    may_be_in_collective,
    read_collective_log,
    read_current_collectives,
)
from grpo_run.runtime.board.disagreement_field import write_disagreement
from grpo_run.runtime.board.exchange import CHANNELS, EXCHANGE_BYTES, Exchange, messages_sent
from grpo_run.runtime.board.phase_histogram import read_phase_histograms
from grpo_run.runtime.board.slot_layout import (
    COLLECTIVE_LOG_AT,
    HISTOGRAMS_AT,
    READING_BYTES,
    SEQUENCE,
    SLOT_BYTES,
    VERSION,
    read_slot,
    with_marks,
)
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.watchdog.accounting.phase_memory import RankMemory
from grpo_run.watchdog.deadlocks.collectives import Collective
from grpo_run.watchdog.observation import PhaseKey, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.durations import Durations

MAGIC = b"GRPOBRD2"
HEADER_BYTES = 4096
READ_ATTEMPTS = 50
REQUEST_STOP = 1
END_RANKS = 2
FREE_CACHES = 4

_HEADER = struct.Struct(
    "<8sIIIIQQ"
)  # magic, slots, slot bytes, attempt, requests, saves requested, created (ns)
_ATTEMPT_AT = 16
_REQUESTS_AT = 20
_SAVES_REQUESTED_AT = 24
_CREATED_AT = 32
_STOPS_AT = 40
"""Requests of `stop_requests.py`: how many were made, and how many the supervisor has taken."""


class Board:
    """The mapped file. The supervisor keeps one mapping for the whole run; each rank opens its own."""

    def __init__(self, memory: mmap.mmap, slots: int, descriptor: int | None = None) -> None:
        self._memory = memory
        self._descriptor = descriptor
        self._readings: dict[int, tuple[tuple[int, bytes, bytes], Slot]] = {}
        self._logs: dict[int, tuple[bytes, tuple[Collective, ...]]] = {}
        self._awaited: AwaitedRank | None = None
        self.slots = slots

    @classmethod
    def create(cls, path: Path, slots: int) -> Board:
        """Create a zeroed board of `slots` slots at `path` (mode 0600), replacing an existing one by rename.

        Raises:
            RunDirectoryError: the file system has no space for it.
        """
        size = _memory_area_offset(slots, slots)
        temporary = path.with_name(path.name + ".new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # writing to a hole on a full disk raises SIGBUS
        except OSError as error:
            os.close(descriptor)
            raise RunDirectoryError(f"no space for the board at {path}: {error.strerror}") from error
        memory = mmap.mmap(descriptor, size)
        _HEADER.pack_into(memory, 0, MAGIC, slots, SLOT_BYTES, 0, 0, 0, time.monotonic_ns())
        os.replace(temporary, path)
        return cls(memory, slots, descriptor)

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Board:
        """Map an existing board.

        Raises:
            RunDirectoryError: `path` is missing or is not a board of this format.
        """
        try:
            with open(path, "r+b" if writable else "rb") as file:
                access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
                memory = mmap.mmap(file.fileno(), 0, access=access)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"no readable board at {path}: {error}") from error
        if len(memory) < HEADER_BYTES or memory[:8] != MAGIC:
            raise RunDirectoryError(f"{path} is not a board of this version")
        _, slots, slot_bytes, *_ = _HEADER.unpack_from(memory, 0)
        if slot_bytes != SLOT_BYTES or len(memory) < HEADER_BYTES + slots * SLOT_BYTES:
            raise RunDirectoryError(f"{path} is truncated or of another version")
        return cls(memory, slots)

    def begin_attempt(self, attempt: int) -> None:
        """Clear all slots and requests. Call it while no rank is running."""
        struct.pack_into("<II", self._memory, _ATTEMPT_AT, attempt, 0)
        self._readings.clear()
        for index in range(self.slots):
            offset = _slot_offset(index)
            self._memory[offset : offset + SLOT_BYTES] = bytes(SLOT_BYTES)
        tables = HEADER_BYTES + self.slots * SLOT_BYTES
        self._memory[tables:] = bytes(len(self._memory) - tables)

    @property
    def attempt(self) -> int:
        """The attempt whose ranks may write here."""
        return int(struct.unpack_from("<I", self._memory, _ATTEMPT_AT)[0])

    def request_stop(self) -> None:
        """Ask the ranks to agree on a step, save and exit. Every vote reads this request."""
        self._set_flag(REQUEST_STOP, True)

    def announce_end(self, announced: bool) -> None:
        """Tell the ranks whether they are about to be ended: a script's own save does not begin meanwhile."""
        self._set_flag(END_RANKS, announced)

    @property
    def ends_ranks(self) -> bool:
        """Whether the ranks are about to be ended."""
        return self._has_flag(END_RANKS)

    def announce_short_memory(self, short: bool) -> None:
        """Tell the ranks whether memory of the host is short: each frees its caches once, after its next step."""
        self._set_flag(FREE_CACHES, short)

    @property
    def memory_is_short(self) -> bool:
        """Whether memory of the host is short."""
        return self._has_flag(FREE_CACHES)

    def _set_flag(self, flag: int, value: bool) -> None:
        if not self.has_full_size:
            return  # the ranks that would read it end too
        (flags,) = struct.unpack_from("<I", self._memory, _REQUESTS_AT)
        struct.pack_into("<I", self._memory, _REQUESTS_AT, flags | flag if value else flags & ~flag)

    def _has_flag(self, flag: int) -> bool:
        (flags,) = struct.unpack_from("<I", self._memory, _REQUESTS_AT)
        return bool(flags & flag)

    def ask_to_stop(self) -> int:
        """Ask the supervisor to stop the run, as `grpo-run stop` does. Returns the number of this request."""
        (count,) = struct.unpack_from("<Q", self._memory, _STOPS_AT)
        struct.pack_into("<Q", self._memory, _STOPS_AT, count + 1)
        return int(count) + 1

    def take_stop(self) -> bool:
        """Take one request of `ask_to_stop`; return whether there was one."""
        asked, taken = struct.unpack_from("<QQ", self._memory, _STOPS_AT)
        if asked <= taken:
            return False
        struct.pack_into("<Q", self._memory, _STOPS_AT + 8, taken + 1)
        return True

    @property
    def stops_taken(self) -> int:
        """How many requests of `ask_to_stop` the supervisor has taken."""
        return int(struct.unpack_from("<Q", self._memory, _STOPS_AT + 8)[0])

    @property
    def created_ns(self) -> int:
        """When the board was created, on the monotonic clock: every supervisor creates a new one."""
        return int(struct.unpack_from("<Q", self._memory, _CREATED_AT)[0])

    def request_save(self) -> None:
        """Ask the ranks for one joint checkpoint at the next step they agree on."""
        (count,) = struct.unpack_from("<Q", self._memory, _SAVES_REQUESTED_AT)
        struct.pack_into("<Q", self._memory, _SAVES_REQUESTED_AT, count + 1)

    @property
    def requests(self) -> tuple[bool, int]:
        """(whether a stop is requested, number of saves requested so far)."""
        flags, saves = struct.unpack_from("<IQ", self._memory, _REQUESTS_AT)
        return bool(flags & REQUEST_STOP), saves

    @property
    def has_full_size(self) -> bool:
        """Whether the file has its original size; access beyond the end of a mapped file raises SIGBUS."""
        return self._descriptor is None or os.fstat(self._descriptor).st_size >= len(self._memory)

    def write_awaited(self, awaited: AwaitedRank | None) -> None:
        """Publish which rank the others wait for, for `grpo-run status`; None while nobody waits."""
        if awaited != self._awaited and self.has_full_size:
            write_awaited(self._memory, awaited)
            self._awaited = awaited

    def read_awaited(self) -> AwaitedRank | None:
        """Return the rank that the others wait for; None while nobody waits for long."""
        return read_awaited(self._memory) if self.has_full_size else None

    def writer(self, index: int, *, rank: int, pid: int, attempt: int) -> SlotWriter:
        """Return the writer of local rank `index`'s slot; the slot is zeroed and gets `rank` and `pid`."""
        if not 0 <= index < self.slots:
            raise IndexError(f"local rank {index} on a board of {self.slots}")
        offset = _slot_offset(index)
        return SlotWriter(
            self._memory,
            offset,
            rank=rank,
            local_rank=index,
            pid=pid,
            attempt=attempt,
            callbacks_at=self._callbacks_at(index),
            memory_area_at=self._memory_area_at(index),
        )

    def exchange(self, index: int, *, attempt: int, channel: str) -> Exchange | None:
        """Return local rank `index`'s end of a channel among the ranks of this node; None on a board of an earlier version.

        The board must be writable.
        """
        if not self._has_exchange:
            return None
        areas = [_exchange_offset(self.slots, other) for other in range(self.slots)]
        return Exchange(self._memory, areas, own=index, attempt=attempt, channel=channel)

    def publish_disagreement(self, text: str) -> None:
        """Let the ranks of the present attempt that wait in the exchange area raise `text`."""
        if self._has_exchange and self.has_full_size:
            write_disagreement(self._memory, self.attempt, text)
            for channel in CHANNELS:
                exchange = self.exchange(0, attempt=self.attempt, channel=channel)
                assert exchange is not None
                exchange.wake_all()

    def messages_sent(self, index: int) -> dict[str, int]:
        """Return how many messages local rank `index` has sent in this attempt, by channel of the exchange area."""
        if not self._has_exchange:
            return {}
        return messages_sent(self._memory, _exchange_offset(self.slots, index), self.attempt)

    def read(self, index: int) -> Slot | None:
        """Return one consistent reading of a slot, or None.

        If a write overlaps every attempt, the reading is the last consistent one of this object, with the
        marks of now: the rank is alive or stopped, but not unobserved. None means unknown: the slot was never
        written or never read consistently, or the file was truncated.
        """
        return self._read(index) if self.has_full_size else None

    def read_all(self) -> list[Slot | None]:
        """Return every slot, by local rank. See `read`."""
        if not self.has_full_size:
            return [None] * self.slots
        return [self._read(index) for index in range(self.slots)]

    def _read(self, index: int) -> Slot | None:
        offset = _slot_offset(index)
        last = self._readings.get(index)
        for _ in range(READ_ATTEMPTS):
            version = VERSION.unpack_from(self._memory, offset)
            if last is not None and last[0] == version:  # most slots do not change between two scans
                return last[1]
            before = version[0]
            if before == 0:
                return None
            raw = self._memory[offset : offset + READING_BYTES]
            (after,) = SEQUENCE.unpack_from(self._memory, offset)
            if before == after and before % 2 == 0:
                slot = read_slot(raw, before, self._callback_name(index))
                self._readings[index] = version, slot
                return slot
        return None if last is None else with_marks(last[1], self._memory, offset)

    def collective_log(self, index: int) -> tuple[Collective, ...]:
        """Return the collectives that local rank `index` issued from Python in this attempt, oldest first."""
        offset = _slot_offset(index) + COLLECTIVE_LOG_AT
        raw = self._memory[offset : offset + LOG_BYTES]
        last = self._logs.get(index)
        if last is None or last[0] != raw:  # the log of a rank that waits does not change
            last = self._logs[index] = raw, read_collective_log(self._memory, offset)
        return last[1]

    def current_collectives(self, index: int, number: int) -> tuple[Collective, ...]:
        """Return the collectives in which a thread of local rank `index` is blocked. Decodes no others.

        If none is, the last one if it runs on a device.

        Args:
            number: `collectives_issued` of the rank's slot.
        """
        return read_current_collectives(self._memory, _slot_offset(index) + COLLECTIVE_LOG_AT, number)

    def last_sequence(self, index: int, number: int, group: str) -> int:
        """Return the sequence number of the last collective of a group that local rank `index` issued from Python.

        0 if its log has none.

        Args:
            number: `collectives_issued` of the rank's slot.
        """
        return last_sequence(self._memory, _slot_offset(index) + COLLECTIVE_LOG_AT, number, group)

    def is_blocked(self, index: int) -> bool:
        """Whether a thread of local rank `index` is blocked in a collective."""
        return is_blocked(self._memory, _slot_offset(index) + COLLECTIVE_LOG_AT)

    def is_in_backward(self, index: int, number: int) -> bool:
        """Whether the last entry of local rank `index` is that of a DDP backward pass which has not ended.

        Args:
            number: `collectives_issued` of the rank's slot.
        """
        return is_in_backward(self._memory, _slot_offset(index) + COLLECTIVE_LOG_AT, number)

    def may_be_in_collective(self, index: int, number: int) -> bool:
        """Whether local rank `index` is blocked in a collective, or its last one runs on a device.

        Args:
            number: `collectives_issued` of the rank's slot.
        """
        return may_be_in_collective(self._memory, _slot_offset(index) + COLLECTIVE_LOG_AT, number)

    def phase_histograms(self, index: int) -> dict[PhaseKey, Durations]:
        """Return the durations of the phases and callbacks that local rank `index` has finished in this attempt."""
        histograms = read_phase_histograms(self._memory, _slot_offset(index) + HISTOGRAMS_AT)
        callbacks_at = self._callbacks_at(index)
        if callbacks_at is not None:
            histograms.update(read_callback_durations(self._memory, callbacks_at))
        return histograms

    def rank_memory(self, index: int) -> RankMemory | None:
        """Return the memory of local rank `index` by phase in this attempt.

        None if the rank has measured nothing, cannot be read, or writes a board of an earlier version.
        """
        offset = self._memory_area_at(index)
        return read_memory_area(self._memory, offset) if offset is not None and self.has_full_size else None

    @property
    def _has_exchange(self) -> bool:
        return len(self._memory) >= _exchange_offset(self.slots, self.slots)

    def _callbacks_at(self, index: int) -> int | None:
        """Where the callback table of local rank `index` begins; None on a board of an earlier version."""
        offset = HEADER_BYTES + self.slots * SLOT_BYTES + index * CALLBACKS_BYTES
        return offset if offset + CALLBACKS_BYTES <= len(self._memory) else None

    def _memory_area_at(self, index: int) -> int | None:
        """Where the memory of local rank `index` begins; None on a board of an earlier version."""
        offset = _memory_area_offset(self.slots, index)
        return offset if offset + MEMORY_AREA_BYTES <= len(self._memory) else None

    def _callback_name(self, index: int) -> Callable[[int], str]:
        callbacks_at = self._callbacks_at(index)
        if callbacks_at is None:
            return lambda number: ""
        return lambda number: read_callback_name(self._memory, callbacks_at, number)


def _slot_offset(index: int) -> int:
    return HEADER_BYTES + index * SLOT_BYTES


def _exchange_offset(slots: int, index: int) -> int:
    """Where local rank `index`'s part of the exchange area begins on a board of `slots` slots."""
    tables_end = HEADER_BYTES + slots * (SLOT_BYTES + CALLBACKS_BYTES)
    return -(-tables_end // 64) * 64 + index * EXCHANGE_BYTES


def _memory_area_offset(slots: int, index: int) -> int:
    """Where local rank `index`'s memory by phase begins on a board of `slots` slots."""
    exchange_end = _exchange_offset(slots, slots)
    return -(-exchange_end // 64) * 64 + index * MEMORY_AREA_BYTES
