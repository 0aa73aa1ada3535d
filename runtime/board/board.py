"""The board file of a run: one slot per local rank and the areas behind the slots.

A board has a header (`_header.py`) and, for each local rank, a slot, a table of durations, an exchange area
and a memory area; `FileLayout` says where they are. The supervisor creates and reads it. Each rank maps it
and writes its own slot (`slot_writer.py`) and messages (`exchange.py`). It stays readable after a rank's
death.

Readings are consistent while ranks write: a reader that sees an odd or changed sequence number reads again,
and then returns its last consistent reading, because a writer may be interrupted in the middle of a write
for any time (by garbage collection, another thread, the kernel). This relies on x86-64's ordered stores;
under a weaker memory model a torn reading is detected unless every field tore alike. Does not interpret
slots and does not notify: readers poll.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.board._duration_table import (
    TABLE_BYTES,
    read_callback_name,
    read_durations,
    read_histograms,
)
from grpo_run.runtime.board._header import (
    HEADER_BYTES,
    BoardHeader,
    read_shape,
    write_disagreement,
    write_header,
)
from grpo_run.runtime.board._slot_layout import (
    COLLECTIVE_LOG_AT,
    DATA_END,
    DATA_END_AT,
    READING_BYTES,
    SEQUENCE,
    SLOT_BYTES,
    VERSION,
    read_slot,
    with_marks,
)
from grpo_run.runtime.board._storage import BoardBytes, BoardFile
from grpo_run.runtime.board.collective_log import LOG_BYTES, read_collective_log
from grpo_run.runtime.board.exchange import CHANNELS, EXCHANGE_BYTES, Exchange, messages_sent
from grpo_run.runtime.board.memory_area import MEMORY_AREA_BYTES, read_memory_area
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.watchdog.deadlocks.collectives import Collective
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import Phase, PhaseKey, Slot
from grpo_run.watchdog.stalls.durations import Durations, Histogram

READ_ATTEMPTS = 50
assert not any(part % 64 for part in (HEADER_BYTES, SLOT_BYTES, TABLE_BYTES, EXCHANGE_BYTES))


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where everything of a board file is: `header | slots | tables of durations | exchange areas |
    memory areas`.

    Each part has one entry for each local rank, which begins at a multiple of 64 bytes.

    Args:
        slots: number of local ranks.
    """

    slots: int

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self.memory_area(self.slots)

    def slot(self, index: int) -> int:
        """Where the slot of local rank `index` begins."""
        return HEADER_BYTES + index * SLOT_BYTES

    def durations(self, index: int) -> int:
        """Where the table of durations of local rank `index` begins."""
        return self.slot(self.slots) + index * TABLE_BYTES

    def exchange(self, index: int) -> int:
        """Where local rank `index`'s part of the exchange area begins."""
        return self.durations(self.slots) + index * EXCHANGE_BYTES

    def memory_area(self, index: int) -> int:
        """Where the memory of local rank `index` begins."""
        return self.exchange(self.slots) + index * MEMORY_AREA_BYTES


class Board(BoardHeader):
    """The board. The supervisor keeps one for the whole run; each rank opens its own.

    Args:
        contents: its bytes.
        slots: number of local ranks.
    """

    def __init__(self, contents: BoardBytes, slots: int) -> None:
        super().__init__(contents)
        self._layout = FileLayout(slots)
        self._readings: dict[int, tuple[tuple[int, bytes, bytes], Slot]] = {}
        """The last consistent reading of each slot, with its version."""
        self._logs: dict[int, tuple[bytes, tuple[Collective, ...]]] = {}
        self.slots = slots

    @classmethod
    def create(cls, path: Path, slots: int) -> Board:
        """Create a zeroed board of `slots` slots at `path` (mode 0600), replacing an existing one by rename.

        Raises:
            RunDirectoryError: the file system has no space for it, or cannot map files.
        """
        size = FileLayout(slots).size_bytes
        temporary = path.with_name(path.name + ".new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        contents = BoardFile(descriptor, size, writable=True)
        try:
            os.posix_fallocate(descriptor, 0, size)  # writing to a hole on a full disk would kill a rank
            contents.try_reads()
            write_header(contents, slots)
            os.replace(temporary, path)
        except (OSError, ValueError) as error:
            contents.close()
            reason = error.strerror if isinstance(error, OSError) else error
            raise RunDirectoryError(f"the board cannot be made at {path}: {reason}") from error
        return cls(contents, slots)

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Board:
        """Open an existing board, as a command does.

        Raises:
            RunDirectoryError: `path` is missing or is not a board of this format.
        """
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
            contents = BoardFile(descriptor, os.fstat(descriptor).st_size, writable=writable)
        except OSError as error:
            raise RunDirectoryError(f"no readable board at {path}: {error}") from error
        return cls._checked(path, contents)

    @classmethod
    def map(cls, path: Path) -> Board:
        """Map an existing board, as a rank does. Keeps no descriptor.

        Raises:
            RunDirectoryError: as `open`.
        """
        try:
            with open(path, "r+b", buffering=0) as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE)
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"no readable board at {path}: {error}") from error
        return cls._checked(path, BoardBytes(mapping))

    @classmethod
    def _checked(cls, path: Path, contents: BoardBytes) -> Board:
        size = contents.size_bytes
        shape = read_shape(contents) if size >= HEADER_BYTES else None
        if shape is None:
            raise RunDirectoryError(f"{path} is not a board of this version")
        slots, slot_bytes = shape
        if slot_bytes != SLOT_BYTES or size < FileLayout(slots).size_bytes:
            raise RunDirectoryError(f"{path} is truncated or of another version")
        return cls(contents, slots)

    def is_at(self, path: Path) -> bool:
        """Whether a rank that maps `path` maps this board."""
        return self._contents.is_at(path)

    def begin_attempt(self, attempt: int) -> None:
        """Clear all slots and requests. Call it while no rank is running."""
        self._start_attempt(attempt)
        self._readings.clear()
        self._logs.clear()
        first = self._layout.slot(0)
        self._contents.write(first, bytes(self._contents.size_bytes - first))

    def writer(self, index: int, *, rank: int, pid: int, attempt: int) -> SlotWriter:
        """Return the writer of local rank `index`'s slot; the slot is zeroed and gets `rank` and `pid`."""
        if not 0 <= index < self.slots:
            raise IndexError(f"local rank {index} on a board of {self.slots}")
        offset = self._layout.slot(index)
        return SlotWriter(
            self._contents.mapping,
            offset,
            rank=rank,
            local_rank=index,
            pid=pid,
            attempt=attempt,
            durations_at=self._layout.durations(index),
            memory_area_at=self._layout.memory_area(index),
        )

    def note_data_end(self, index: int, step: int) -> None:
        """Let other ranks know that the data of local rank `index` ends with a step."""
        self._contents.write(self._layout.slot(index) + DATA_END_AT, DATA_END.pack(step))

    def data_ends(self) -> list[int]:
        """Return with which step the data of each local rank has ended last; 0 for never in this attempt."""
        places = (self._layout.slot(index) + DATA_END_AT for index in range(self.slots))
        return [DATA_END.unpack(self._contents.read(place, DATA_END.size))[0] for place in places]

    def exchange(self, index: int, *, attempt: int, channel: str) -> Exchange:
        """Return local rank `index`'s end of a channel among the ranks of this node.

        The board must be writable.
        """
        areas = [self._layout.exchange(other) for other in range(self.slots)]
        return Exchange(self._contents.mapping, areas, own=index, attempt=attempt, channel=channel)

    def publish_disagreement(self, text: str) -> None:
        """Let the ranks of the present attempt that wait in the exchange area raise `text`."""
        if not self.has_full_size:
            return
        write_disagreement(self._contents, self.attempt, text)
        for channel in CHANNELS:
            try:
                exchange = self.exchange(0, attempt=self.attempt, channel=channel)
            except (OSError, ValueError):
                return  # truncated now, or out of address space: the ranks are ended without the text
            exchange.wake_all()

    def messages_sent(self, index: int) -> dict[str, int]:
        """Return how many messages local rank `index` has sent in this attempt, by channel of the exchange
        area.
        """
        return messages_sent(self._contents, self._layout.exchange(index), self.attempt)

    def read_all(self) -> list[Slot | None]:
        """Return every slot, by local rank; None for those that are unknown, as all are once the file was
        truncated.
        """
        if not self.has_full_size:
            return [None] * self.slots
        return [self.read(index) for index in range(self.slots)]

    def read(self, index: int) -> Slot | None:
        """Return one consistent reading of a slot, or None.

        If a write overlaps every attempt, the reading is the last consistent one of this object, with the
        marks of now: the rank is alive or stopped, but not unobserved. None means unknown: the slot was never
        written or never read consistently.
        """
        offset = self._layout.slot(index)
        last = self._readings.get(index)
        raw = b""
        for _ in range(READ_ATTEMPTS):
            raw = self._contents.read(offset, READING_BYTES)
            version = VERSION.unpack_from(raw)
            if last is not None and last[0] == version:  # most slots do not change between two scans
                return last[1]
            before = version[0]
            if before == 0:
                return None
            raw = self._contents.read(offset, READING_BYTES)  # copied between two reads of the number
            (after,) = SEQUENCE.unpack(self._contents.read(offset, SEQUENCE.size))
            if before == after and before % 2 == 0:
                slot = read_slot(
                    raw, before, lambda number: read_callback_name(self._durations(index), number)
                )
                self._readings[index] = version, slot
                return slot
        return None if last is None else with_marks(last[1], raw)

    def collective_log(self, index: int) -> tuple[Collective, ...]:
        """Return the collectives that local rank `index` issued from Python in this attempt, oldest first."""
        raw = self.copy_log(index)
        last = self._logs.get(index)
        if last is None or last[0] != raw:  # the log of a rank that waits does not change
            last = self._logs[index] = raw, read_collective_log(raw, self.copy_log(index))
        return last[1]

    def durations(self, index: int) -> dict[PhaseKey, Durations]:
        """Return the durations of the phases and callbacks that local rank `index` has finished in this
        attempt.
        """
        return read_durations(self._durations(index))

    def histograms(self, index: int) -> dict[Phase, Histogram]:
        """Return the durations of the phases that local rank `index` has ended in this attempt, to export."""
        return read_histograms(self._durations(index))

    def _durations(self, index: int) -> bytes:
        return self._contents.read(self._layout.durations(index), TABLE_BYTES)

    def rank_memory(self, index: int) -> RankMemory | None:
        """Return the memory of local rank `index` by phase in this attempt.

        None if the rank has measured nothing or cannot be read.
        """
        return read_memory_area(self._contents, self._layout.memory_area(index))

    def copy_log(self, index: int) -> bytes:
        """Return a copy of the log of local rank `index`, of 61 kB, for the questions of
        `collective_log.py`.
        """
        return self._contents.read(self._layout.slot(index) + COLLECTIVE_LOG_AT, LOG_BYTES)
