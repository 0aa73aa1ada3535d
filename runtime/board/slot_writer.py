"""Writer of one rank's slot. Created by the rank's session; called by the hooks at every phase and step.

A write is a few `struct.pack_into` calls between two increments of a sequence number (a seqlock: the number
is odd during a write). It takes no lock and no system call, and costs 1 to 2 µs. Does not notify readers;
they poll.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import NamedTuple

from grpo_run.runtime.board._duration_table import DurationTableWriter
from grpo_run.runtime.board._slot_layout import (
    COLLECTIVE_LOG_AT,
    COLLECTIVES_ISSUED_AT,
    FLOATS_AT,
    GENERATION_PASSES_AT,
    HEARTBEAT_AT,
    IDENTITY,
    IDENTITY_AT,
    INTEGERS_AT,
    LAST_WORK_AT,
    LOGGED_AT,
    LOGGED_VALUES,
    MARK,
    MAX_IDLE_THREADS,
    MAX_OPEN_PHASES,
    NEVER_LOGGED,
    OPEN_PHASES,
    OPEN_PHASES_AT,
    SEQUENCE,
    SLOT_BYTES,
    THREADS,
    THREADS_AT,
    write_floats,
    write_integers,
)
from grpo_run.runtime.board.collective_log import CollectiveLogWriter
from grpo_run.runtime.board.memory_area import MemoryAreaWriter
from grpo_run.watchdog.observation import Phase, RankState, SlotFields
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS

_PHASES_ATTRIBUTE = "_grpo_run_phases"


_PADDINGS = tuple((0,) * (MAX_OPEN_PHASES - depth) for depth in range(MAX_OPEN_PHASES + 1))
"""What the places of phases that are not open hold, by the number of those that are."""


class _OpenPhase(NamedTuple):
    """An open phase: what it is, its number in the duration table, and its start (ns)."""

    phase: Phase
    number: int
    since: int


class FailedPhases(NamedTuple):
    """The phases that were open when an exception was raised, the outermost first, and the user's
    callback.
    """

    phases: tuple[Phase, ...]
    callback: str


def phases_of(error: BaseException) -> FailedPhases | None:
    """Return in which phases an exception was raised; None if it has left no phase."""
    found = getattr(error, _PHASES_ATTRIBUTE, None)
    return found if isinstance(found, FailedPhases) else None


def _leaves(error: BaseException, frame: FrameType) -> bool:
    """Whether an exception is on its way through a frame; otherwise the frame runs while the exception is
    handled.
    """
    return error.__traceback__ is not None and error.__traceback__.tb_frame is frame


class SlotWriter(SlotFields):
    """The only writer of one slot. One thread of a rank uses it at a time; it never blocks.

    Set attributes directly, then call `publish()`. Any thread may call `heartbeat` and `record_work`,
    the heartbeat's thread also `publish_threads`.
    `on_enter` is called with each phase that begins, after the phase is on the board. `on_change` is called
    before another phase begins to run, with the innermost phase that runs now and the one that runs then;
    None stands for no phase.

    Args:
        memory: the board's writable mapping.
        offset: where the slot begins; the slot is zeroed.
        durations_at: where the rank's table of durations begins; it is zeroed too.
        memory_area_at: where its memory by phase begins; likewise.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        offset: int,
        *,
        rank: int,
        local_rank: int,
        pid: int,
        attempt: int,
        durations_at: int,
        memory_area_at: int,
    ) -> None:
        super().__init__()
        self.state = RankState.starting
        self.on_enter: Callable[[Phase], None] | None = None
        self.on_change: Callable[[Phase | None, Phase | None], None] | None = None
        self._memory = memory
        self._offset = offset
        self._phases_at = slice(offset + OPEN_PHASES_AT, offset + OPEN_PHASES_AT + OPEN_PHASES.size)
        self._sequence = 0
        self._open_phases: list[_OpenPhase] = []
        self._published_work = (0, 0)
        self._generation_passes = 0
        self._logged = list(NEVER_LOGGED)
        memory[offset : offset + SLOT_BYTES] = bytes(SLOT_BYTES)
        self.collective_log = CollectiveLogWriter(
            memory, offset + COLLECTIVE_LOG_AT, offset + COLLECTIVES_ISSUED_AT
        )
        self._durations = DurationTableWriter(memory, durations_at)
        self.memory_area = MemoryAreaWriter(memory, memory_area_at)
        self._callback = ""
        IDENTITY.pack_into(memory, offset + IDENTITY_AT, rank, local_rank, pid, attempt)
        self.heartbeat()
        self.log({})
        self.publish()

    @property
    def running(self) -> Phase | None:
        """The innermost open phase."""
        return self._open_phases[-1].phase if self._open_phases else None

    @property
    def running_name(self) -> str | None:
        """The name of the innermost open phase, or of the user's callback that it is."""
        phase = self.running
        return None if phase is None else self._callback if phase is Phase.callback else phase.name

    @property
    def open_phases(self) -> tuple[Phase, ...]:
        """The phases that have begun and not ended, the outermost first."""
        return tuple(one.phase for one in self._open_phases)

    def enter(self, phase: Phase) -> None:
        """Open a phase inside the current one."""
        self._open(phase, phase)

    def enter_callback(self, name: str) -> None:
        """Open a `callback` phase inside the current one. `leave(Phase.callback)` closes it.

        Args:
            name: class and event of the user's callback; its durations are kept by this name.
        """
        self._callback = name
        self._open(Phase.callback, self._durations.number_of(name))

    def leave(self, phase: Phase) -> None:
        """Close the innermost open `phase` and every phase still open inside it.

        Ignore a phase that is not open. An exception that leaves the phase keeps the phases that it was
        raised in, see `phases_of`.
        """
        error = sys.exc_info()[1]
        if error is not None and _leaves(error, sys._getframe(1)):
            self._mark(error)
        phases, left = self._open_phases, None
        for depth in range(len(phases) - 1, -1, -1):
            if phases[depth].phase == phase:
                left = depth
                break
        if left is not None and self.on_change is not None:
            self.on_change(phases[-1].phase, phases[left - 1].phase if left else None)
        now = time.monotonic_ns()
        if left is not None:
            self._close(left, now)
        self._publish_phases(now)

    def replace(self, phase: Phase) -> None:
        """Close all open phases and open `phase` as the outermost one."""
        self._open(phase, phase, closes=True)

    def publish(self) -> None:
        """Write every field as one consistent reading, and stamp the time of last progress."""
        memory, offset = self._memory, self._offset
        work = (self.tokens_generated, self.rewards_scored)
        if work != self._published_work:
            self._published_work = work
            self.record_work()
        self._begin_write()
        write_integers(memory, offset + INTEGERS_AT, self)
        write_floats(memory, offset + FLOATS_AT, self)
        self._end_write()
        self._publish_phases(time.monotonic_ns())

    def heartbeat(self) -> None:
        """Stamp the heartbeat: a thread of this interpreter is running."""
        MARK.pack_into(self._memory, self._offset + HEARTBEAT_AT, time.monotonic_ns())

    def publish_threads(self, heartbeat: int, idle: Sequence[int]) -> None:
        """Publish the native ids of threads that wake no other thread; the first `MAX_IDLE_THREADS` of
        `idle`.
        """
        listed = list(idle[:MAX_IDLE_THREADS])
        listed += [0] * (MAX_IDLE_THREADS - len(listed))
        THREADS.pack_into(self._memory, self._offset + THREADS_AT, heartbeat, *listed)

    def record_work(self) -> None:
        """Stamp the time of measurable work: a forward pass, generated tokens, scored rewards."""
        MARK.pack_into(self._memory, self._offset + LAST_WORK_AT, time.monotonic_ns())

    def record_pass(self) -> None:
        """Record a forward pass of the model: work, and in `generate` one more token of every unfinished
        completion.
        """
        self.record_work()
        if self._open_phases and self._open_phases[-1].phase is Phase.generate:
            self._generation_passes += 1
            MARK.pack_into(self._memory, self._offset + GENERATION_PASSES_AT, self._generation_passes)

    def log(self, values: Mapping[str, float]) -> None:
        """Write what was logged, by field of `watchdog/rank_metrics.py`; other fields keep their values."""
        for field, value in values.items():
            self._logged[LOGGED_FIELDS.index(field)] = value
        self._begin_write()
        LOGGED_VALUES.pack_into(self._memory, self._offset + LOGGED_AT, *self._logged)
        self._end_write()

    def detach(self) -> None:
        """Redirect all further writes to private memory. Called in a forked child, which is not the rank."""
        private = mmap.mmap(-1, len(self._memory))
        self._memory = private
        self.on_enter = self.on_change = None
        self.collective_log.detach(private)
        self._durations.detach(private)
        self.memory_area.detach(private)

    def _mark(self, error: BaseException) -> None:
        """Note in an exception where it was raised; the innermost phase that it leaves comes first."""
        if not hasattr(error, _PHASES_ATTRIBUTE):
            phases = tuple(one.phase for one in self._open_phases)
            callback = self._callback if Phase.callback in phases else ""
            # the script's exceptions may refuse attributes
            with contextlib.suppress(AttributeError, TypeError):
                setattr(error, _PHASES_ATTRIBUTE, FailedPhases(phases, callback))

    def _open(self, phase: Phase, number: int, *, closes: bool = False) -> None:
        if self.on_change is not None:
            self.on_change(self.running, phase)
        now = time.monotonic_ns()
        if closes:
            self._close(0, now)
        self._open_phases.append(_OpenPhase(phase, number, now))
        self._publish_phases(now)
        if self.on_enter is not None:
            self.on_enter(phase)

    def _close(self, depth: int, now: int) -> None:
        for _, number, since in self._open_phases[depth:]:
            self._durations.add(number, (now - since) / 1e9)
        del self._open_phases[depth:]

    def _begin_write(self) -> None:
        """Make the sequence number odd, even if an exception from a signal handler left it odd."""
        self._sequence += 1 + (self._sequence & 1)
        SEQUENCE.pack_into(self._memory, self._offset, self._sequence)

    def _end_write(self) -> None:
        """Make the sequence number even, even if a second thread has written at the same time."""
        self._sequence = (self._sequence | 1) + 1
        SEQUENCE.pack_into(self._memory, self._offset, self._sequence)

    def _publish_phases(self, now: int) -> None:
        phases = self._open_phases
        if len(phases) > MAX_OPEN_PHASES:
            phases = phases[-MAX_OPEN_PHASES:]
        _, numbers, begins = zip(*phases, strict=True) if phases else ((), (), ())
        padding = _PADDINGS[len(phases)]
        # complete before the write begins: building the tuples may start a garbage collection of a second
        packed = OPEN_PHASES.pack(now, self.state, len(phases), *numbers, *padding, *begins, *padding)
        self._begin_write()
        self._memory[self._phases_at] = packed
        self._end_write()
