"""The board: one memory-mapped file in which every local rank keeps a slot, readable after its death.

The supervisor creates it and reads it; each rank's bootstrap and guard write one slot of their own.
A write is a few `struct.pack_into` calls between two increments of a sequence number (a seqlock:
odd while writing), so it takes no lock, no system call and about a microsecond, and a reader
that sees an odd or changed number reads again. Ordering relies on the stores of one x86-64 thread
being seen in order; on weaker memory models a torn reading is still caught unless every field tore
alike. Does not interpret slots and does not notify: readers poll.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from grpo_run.runtime.board.collective_log import RING_BYTES, NoteWriter, blocked, in_collective, read_notes
from grpo_run.runtime.board.phase_histogram import TALLIES_BYTES, TallyWriter, read_tallies
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.watchdog.deadlocks.collectives import Collective
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.durations import Durations

MAGIC = b"GRPOBRD2"
HEADER_BYTES = 4096
SLOT_BYTES = 65536
READING_BYTES = 512
"""What `read` copies: everything but tallies and notes."""
MAX_OPEN_PHASES = 8
READ_ATTEMPTS = 50

_HEADER = struct.Struct("<8sIIIIQQ")  # magic, slots, slot bytes, attempt, requests, save counter, created ns
_SEQUENCE = struct.Struct("<Q")
_IDENTITY = struct.Struct("<IIII")  # rank, local rank, pid, attempt
_STACK = struct.Struct(
    f"<QII{MAX_OPEN_PHASES}I{MAX_OPEN_PHASES}Q"
)  # last progress ns, state, depth, phases, since
_PROGRESS = struct.Struct("<iiiiiiiQQQQQQ")
_GAUGES = struct.Struct("<ddddddddd")

_IDENTITY_AT = 8
_STACK_AT = 64
_PROGRESS_AT = 256
_MARKS_AT = 344  # 8-byte stores of their own, outside the seqlock: beat, counted progress, last note's number
_GAUGES_AT = 384
_TALLIES_AT = 1024
_NOTES_AT = 4352
assert _TALLIES_AT + TALLIES_BYTES <= _NOTES_AT
assert _NOTES_AT + RING_BYTES <= SLOT_BYTES
_MARK = struct.Struct("<Q")
_NAN = float("nan")

REQUEST_STOP = 1


class SlotWriter:
    """The one writer of one slot. Used by a single thread of a rank at a time; never blocks.

    Attributes are set directly, then published by `touch()`, which also stamps progress. `beat` and `count` may
    be called from any thread. `on_enter` is called in each phase that begins, once it is on the board.
    """

    def __init__(
        self, memory: mmap.mmap, offset: int, *, rank: int, local_rank: int, pid: int, attempt: int
    ) -> None:
        self._memory = memory
        self._offset = offset
        self._sequence = 0
        self._stack: list[tuple[int, int]] = []
        self.state = RankState.starting
        self.train_call = 0
        self.step = 0
        self.target_steps = 0
        self.voted_step = 0
        self.voted_at_ns = 0
        self.committed_step = 0
        self.train_started_ns = 0
        self.resumed_step = 0
        self.tokens_generated = 0
        self.rewards_scored = 0
        self.votes = 0
        self.vote_wait_seconds = 0.0
        self.hygiene_runs = 0
        self.hygiene_seconds = 0.0
        self.checkpoint_step = 0
        self.checkpoint_seconds = 0.0
        self.reward = self.completion_length = self.loss = self.grad_norm = self.learning_rate = _NAN
        self._counted = (0, 0)
        self.on_enter: Callable[[Phase], None] | None = None
        memory[offset : offset + SLOT_BYTES] = bytes(SLOT_BYTES)
        self.notes = NoteWriter(memory, offset + _NOTES_AT, offset + _MARKS_AT + 16)
        self._tallies = TallyWriter(memory, offset + _TALLIES_AT)
        _IDENTITY.pack_into(memory, offset + _IDENTITY_AT, rank, local_rank, pid, attempt)
        self.beat()
        self.touch()

    def enter(self, phase: Phase) -> None:
        """Open a phase inside the present one."""
        now = time.monotonic_ns()
        self._stack.append((phase, now))
        self._publish_stack(now)
        if self.on_enter is not None:
            self.on_enter(phase)

    def leave(self, phase: Phase) -> None:
        """Close the innermost `phase` and whatever was left open inside it; unknown phases are ignored."""
        now = time.monotonic_ns()
        for depth in range(len(self._stack) - 1, -1, -1):
            if self._stack[depth][0] == phase:
                self._close(depth, now)
                break
        self._publish_stack(now)

    def replace(self, phase: Phase) -> None:
        """Close every open phase and open this one: the top level of a step."""
        now = time.monotonic_ns()
        self._close(0, now)
        self._stack.append((phase, now))
        self._publish_stack(now)
        if self.on_enter is not None:
            self.on_enter(phase)

    def _close(self, depth: int, now: int) -> None:
        for phase, since in self._stack[depth:]:
            self._tallies.add(phase, (now - since) / 1e9)
        del self._stack[depth:]

    def beat(self) -> None:
        """Say that the interpreter runs: some thread of it came to this line."""
        _MARK.pack_into(self._memory, self._offset + _MARKS_AT, time.monotonic_ns())

    def count(self) -> None:
        """Say that work was done that can be counted (a forward pass, a token, a score): slow is not hung."""
        _MARK.pack_into(self._memory, self._offset + _MARKS_AT + 8, time.monotonic_ns())

    def disown(self) -> None:
        """Write to nowhere from here on: a forked child is not the rank."""
        nowhere = mmap.mmap(-1, len(self._memory))
        self._memory = nowhere
        self.notes.disown(nowhere)
        self._tallies.disown(nowhere)

    def _begin_write(self) -> None:
        """Make the number odd, also when a signal handler's exception left it odd in the middle of a write."""
        self._sequence += 1 + (self._sequence & 1)
        _SEQUENCE.pack_into(self._memory, self._offset, self._sequence)

    def _publish_stack(self, now: int) -> None:
        memory, offset = self._memory, self._offset
        stack = self._stack[-MAX_OPEN_PHASES:]
        padding = (0,) * (MAX_OPEN_PHASES - len(stack))
        self._begin_write()
        _STACK.pack_into(
            memory,
            offset + _STACK_AT,
            now,
            self.state,
            len(stack),
            *[entry[0] for entry in stack],
            *padding,
            *[entry[1] for entry in stack],
            *padding,
        )
        self._sequence += 1
        _SEQUENCE.pack_into(memory, offset, self._sequence)

    def touch(self) -> None:
        """Publish every attribute, as one consistent reading, and stamp progress."""
        memory, offset = self._memory, self._offset
        counted = (self.tokens_generated, self.rewards_scored)
        if counted != self._counted:
            self._counted = counted
            self.count()
        self._begin_write()
        _PROGRESS.pack_into(
            memory,
            offset + _PROGRESS_AT,
            self.train_call,
            self.step,
            self.target_steps,
            self.voted_step,
            self.committed_step,
            self.resumed_step,
            self.checkpoint_step,
            self.voted_at_ns,
            self.train_started_ns,
            self.tokens_generated,
            self.rewards_scored,
            self.votes,
            self.hygiene_runs,
        )
        _GAUGES.pack_into(
            memory,
            offset + _GAUGES_AT,
            self.vote_wait_seconds,
            self.hygiene_seconds,
            self.checkpoint_seconds,
            self.reward,
            self.completion_length,
            self.loss,
            self.grad_norm,
            self.learning_rate,
            0.0,
        )
        self._sequence += 1
        _SEQUENCE.pack_into(memory, offset, self._sequence)
        self._publish_stack(time.monotonic_ns())


class Board:
    """The mapped file. The supervisor holds one for the whole run; each rank opens its own mapping."""

    def __init__(self, memory: mmap.mmap, slots: int, descriptor: int | None = None) -> None:
        self._memory = memory
        self._descriptor = descriptor
        self._readings: dict[int, tuple[bytes, Slot]] = {}
        self.slots = slots

    @classmethod
    def create(cls, path: Path, slots: int) -> Board:
        """Make a zeroed board of `slots` slots at `path` (mode 0600), replacing an earlier one by rename."""
        size = HEADER_BYTES + slots * SLOT_BYTES
        temporary = path.with_name(path.name + ".new")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a hole in a full disk would be a SIGBUS later
        except OSError as error:
            os.close(descriptor)
            raise RunDirectoryError(f"no room for the board at {path}: {error.strerror}") from error
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
        """Forget what the last attempt's ranks wrote and any request; called with no rank alive."""
        struct.pack_into("<II", self._memory, 16, attempt, 0)
        for index in range(self.slots):
            offset = HEADER_BYTES + index * SLOT_BYTES
            self._memory[offset : offset + SLOT_BYTES] = bytes(SLOT_BYTES)

    def request_stop(self) -> None:
        """Ask the ranks to agree on a step, save and leave. Read by each vote."""
        struct.pack_into("<I", self._memory, 20, REQUEST_STOP)

    def request_save(self) -> None:
        """Ask the ranks for one joint checkpoint at the next step they agree on."""
        (count,) = struct.unpack_from("<Q", self._memory, 24)
        struct.pack_into("<Q", self._memory, 24, count + 1)

    @property
    def requests(self) -> tuple[bool, int]:
        """(stop requested, number of saves ever requested)."""
        flags, saves = struct.unpack_from("<IQ", self._memory, 20)
        return bool(flags & REQUEST_STOP), saves

    @property
    def intact(self) -> bool:
        """The file still has the size it was made with; touching a mapping past its file's end is a SIGBUS."""
        return self._descriptor is None or os.fstat(self._descriptor).st_size >= len(self._memory)

    @property
    def attempt(self) -> int:
        """The attempt whose ranks may write here."""
        return int(struct.unpack_from("<I", self._memory, 16)[0])

    def writer(self, index: int, *, rank: int, pid: int, attempt: int) -> SlotWriter:
        """The slot of local rank `index`, zeroed and signed by `rank` and `pid`."""
        if not 0 <= index < self.slots:
            raise IndexError(f"local rank {index} on a board of {self.slots}")
        offset = HEADER_BYTES + index * SLOT_BYTES
        return SlotWriter(self._memory, offset, rank=rank, local_rank=index, pid=pid, attempt=attempt)

    def read(self, index: int) -> Slot | None:
        """One consistent reading of a slot, or None: never written, cut off, or torn at every try (unknown)."""
        if not self.intact:
            return None
        offset = HEADER_BYTES + index * SLOT_BYTES
        for _ in range(READ_ATTEMPTS):
            (before,) = _SEQUENCE.unpack_from(self._memory, offset)
            if before == 0:
                return None
            raw = self._memory[offset : offset + READING_BYTES]
            (after,) = _SEQUENCE.unpack_from(self._memory, offset)
            if before == after and before % 2 == 0:
                last = self._readings.get(index)
                if last is None or last[0] != raw:  # between two looks most slots do not change
                    last = self._readings[index] = raw, _decode(raw, before)
                return last[1]
        return None

    def notes(self, index: int) -> tuple[Collective, ...]:
        """The collectives that local rank `index` issued from Python in this attempt, oldest first."""
        return read_notes(self._memory, HEADER_BYTES + index * SLOT_BYTES + _NOTES_AT)

    def blocked(self, index: int) -> bool:
        """Whether a thread of local rank `index` waits for a collective."""
        return blocked(self._memory, HEADER_BYTES + index * SLOT_BYTES + _NOTES_AT)

    def in_collective(self, index: int, number: int) -> bool:
        """Whether local rank `index` waits in a collective, or may on a device; `number` is its reading's `notes`."""
        return in_collective(self._memory, HEADER_BYTES + index * SLOT_BYTES + _NOTES_AT, number)

    def tallies(self, index: int) -> dict[Phase, Durations]:
        """How long local rank `index` took for its phases in this attempt."""
        return read_tallies(self._memory, HEADER_BYTES + index * SLOT_BYTES + _TALLIES_AT)

    def read_all(self) -> list[Slot | None]:
        """Every slot by local rank."""
        return [self.read(index) for index in range(self.slots)]


def _decode(raw: bytes, sequence: int) -> Slot:
    rank, local_rank, pid, attempt = _IDENTITY.unpack_from(raw, _IDENTITY_AT)
    progress_ns, state, depth, *stack = _STACK.unpack_from(raw, _STACK_AT)
    progress = _PROGRESS.unpack_from(raw, _PROGRESS_AT)
    gauges = _GAUGES.unpack_from(raw, _GAUGES_AT)
    return Slot(
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        attempt=attempt,
        state=RankState(state),
        phases=tuple(
            OpenPhase(phase=Phase(stack[i]), since_seconds=stack[MAX_OPEN_PHASES + i] / 1e9)
            for i in range(depth)
        ),
        train_call=progress[0],
        step=progress[1],
        target_steps=progress[2],
        voted_step=progress[3],
        committed_step=progress[4],
        resumed_step=progress[5],
        checkpoint_step=progress[6],
        voted_at_seconds=progress[7] / 1e9,
        train_started_seconds=progress[8] / 1e9,
        tokens_generated=progress[9],
        rewards_scored=progress[10],
        votes=progress[11],
        hygiene_runs=progress[12],
        last_progress_seconds=progress_ns / 1e9,
        writes=sequence // 2,
        vote_wait_seconds=gauges[0],
        hygiene_seconds=gauges[1],
        checkpoint_seconds=gauges[2],
        reward=gauges[3],
        completion_length=gauges[4],
        loss=gauges[5],
        grad_norm=gauges[6],
        learning_rate=gauges[7],
        beat_seconds=_MARK.unpack_from(raw, _MARKS_AT)[0] / 1e9,
        counted_seconds=_MARK.unpack_from(raw, _MARKS_AT + 8)[0] / 1e9,
        notes=_MARK.unpack_from(raw, _MARKS_AT + 16)[0],
    )
