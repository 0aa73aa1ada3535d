"""Host memory in the supervisor: protection, samples, relief, and kills by the kernel.

Called at the supervisor's start, for each attempt, and at every poll. Lets the kernel prefer ranks to the
supervisor when it must kill a process, keeps the last sample on disk, and tells the incident investigation
which ranks the kernel has killed. When memory is short (`watchdog/memory/host_pressure.py`), `MemoryRelief`
frees snapshots in memory that are on disk, or superseded, drains the newest one and frees it too, and lets
the ranks free their caches; no memory is taken for snapshots. A rank that goes on growing is killed by the
kernel, and recovered.

Does not make verdicts.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.events import MemoryFreed, MemoryShort
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import read_memory
from grpo_run.runtime.memory.host_accounting import HostMemory
from grpo_run.runtime.memory.host_last_sample import LastSample
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.headroom import MEMORY_RESERVE
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.upstream import process_names
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.memory.host_pressure import LEAST_FREE_BYTES, shortage
from grpo_run.watchdog.memory.host_reading import groups_of
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, describe_use
from grpo_run.watchdog.observation import Exit
from grpo_run.watchdog.processes import read_file

CALM_SECONDS = 30.0
"""Memory counts as short for so long after the last sample that showed it."""
FREE_SECONDS = 1.0
"""Between two looks at what can be freed."""


class MemoryRelief:
    """The response of one run. Times are monotonic seconds.

    Args:
        drains: the run's snapshots in memory; None if there are none.
    """

    def __init__(self, drains: DrainScheduler | None, reporter: Reporter) -> None:
        self._drains = drains
        self._reporter = reporter
        self._short_at: float | None = None
        self._free_at = 0.0
        self.leaves_little = False
        """So little memory was free in this attempt that no more was taken for snapshots."""

    def begin_attempt(self) -> None:
        """Begin with the ranks of a new attempt."""
        self._end()
        self.leaves_little = False

    def record(self, sample: HostSample, attempt: Attempt, board: Board, now: float) -> None:
        """Take a sample into account, in which every rank has its memory, and act."""
        loads = attempt.committed == (0, 0)
        nearest = sample.nearest
        self.leaves_little |= nearest is not None and _leaves_little(nearest)
        text = shortage(sample)
        if text is None:
            if self._short_at is not None and now - self._short_at >= CALM_SECONDS:
                self._end()
                board.announce_short_memory(False)
            return
        if self._short_at is None:
            self._begin(text, sample, board)
        self._short_at = now
        if now >= self._free_at:
            self._free_at = now + FREE_SECONDS
            freed_bytes = self._drains.free_memory(keep_newest=loads) if self._drains is not None else 0
            if freed_bytes:
                self._reporter.write(MemoryFreed(size_bytes=freed_bytes))

    def _begin(self, text: str, sample: HostSample, board: Board) -> None:
        use = describe_use(sample, sample.nearest)
        users = f" ({use})" if use else ""
        self._reporter.write(MemoryShort(sentence=f"{text}{users}"))
        self._reporter.warn_once(
            0,
            "short memory",
            f"memory is short: {text}{users}; freeing caches and snapshots that are on disk",
        )
        if self._drains is not None:
            self._drains.memory_is_short = True
        board.announce_short_memory(True)

    def _end(self) -> None:
        self._short_at = None
        self._free_at = 0.0
        if self._drains is not None:
            self._drains.memory_is_short = False


def _leaves_little(use: LimitUse) -> bool:
    return use.limit_bytes - use.working_set_bytes < MEMORY_RESERVE.of(use.limit_bytes)


SCORE_RAISE = 50
"""How much more readily the kernel kills a rank, in thousandths of the memory (proc_pid_oom_score_adj(5)):
supervisor and forkserver use less than 5 % of any memory in which ranks train. Raising it needs no privilege.
"""
MAX_SCORE = 1000
REPLICATED = "ddp"
"""Layout of a checkpoint of which every rank loads all."""


class HostWatch:
    """Watches the host's memory during one run.

    Args:
        run: its directory, which receives the last sample.
        drains: writes the run's snapshots in memory to disk; None if there are none.
    """

    def __init__(
        self, run: RunDirectory, drains: DrainScheduler | None, reporter: Reporter, history: History
    ) -> None:
        self._staging = drains.staging if drains is not None else None
        self._history = history
        self._relief = MemoryRelief(drains, reporter)
        self._board: Board | None = None
        self._reporter = reporter
        self._memory = HostMemory(
            staging_bytes=self._staging_bytes, own_pids=_own_pids, publish=LastSample(run.host_memory).write
        )

    @property
    def latest(self) -> HostSample | None:
        """The last sample; None before the first."""
        return self._memory.latest

    def begin(self) -> None:
        """Say what the kernel would do to this supervisor."""
        together = next((group for group in groups_of(os.getpid()) if group.kills_whole_group), None)
        if together is not None:
            self._reporter.warn(
                None,
                f"{together.folder} has memory.oom.group=1: if its memory is full, the kernel ends this"
                " supervisor together with the ranks",
            )

    @property
    def spares_memory(self) -> bool:
        """Whether the next attempt is to find as much free memory as possible.

        The kernel has killed a rank, or little was free in the last attempt, or too little for ranks that
        load: snapshots would take their part again.
        """
        recoveries = self._history.recoveries
        failed = bool(recoveries) and recoveries[-1].recovery_seconds is None
        killed = failed and recoveries[-1].cause == Cause.host_oom
        return killed or self._relief.leaves_little or self._loading_may_not_fit()

    def begin_attempt(self, pids: Mapping[int, int]) -> None:
        """Watch the ranks that were just started, by rank."""
        for pid in pids.values():
            prefer_to_kill(pid)
        self._memory.begin_attempt(pids)
        self._relief.begin_attempt()

    def poll(self, attempt: Attempt, board: Board, now: float) -> None:
        """Read what is due, and act if memory is short. `now` is in monotonic seconds."""
        self._board = board
        try:
            sampled = self._memory.poll()
            whole = self._memory.whole
            if sampled and whole is not None and not attempt.exits.seen:
                self._relief.record(whole, attempt, board, now)
        except (OSError, MemoryError) as error:
            text = f"host memory cannot be monitored at present: {error or type(error).__name__}"
            self._reporter.warn_once(0, "host memory", text)

    def kills_of(self, exits: Collection[Exit]) -> KernelKills:
        """Return which of the ranks that have exited the kernel has killed for lack of memory."""
        return self._memory.kills_of(exits)

    def _loading_may_not_fit(self) -> bool:
        """Whether the ranks as they were, and once more what they load, exceed a limit.

        A rank that loads has a tensor of the checkpoint and that of its model or optimizer at the same time.
        If these are on a device, it holds one tensor at a time, and the ranks together less than the
        checkpoint.
        """
        sample = self._memory.last_whole
        newest = next(iter(self._staging.snapshots()), None) if self._staging is not None else None
        if sample is None or newest is None or self._board is None:
            return False
        staged, slot = newest
        on_device = any(memory is not None and memory.has_device for memory in read_memory(self._board))
        copies = len(sample.ranks) if staged.layout == REPLICATED and not on_device else 1
        loaded_bytes = copies * slot.size_bytes()
        least_bytes = LEAST_FREE_BYTES * (len(sample.ranks) + 1)
        return any(
            use.working_set_bytes + loaded_bytes + least_bytes > use.limit_bytes for use in sample.limits
        )

    def _staging_bytes(self) -> int:
        if self._staging is None:
            return 0
        with contextlib.suppress(OSError):  # a slot is being emptied
            return sum(slot.size_bytes() for slot in self._staging.slots)
        return 0


def prefer_to_kill(pid: int) -> None:
    """Raise the score by which the kernel chooses whom to kill when memory is full, for a process and what it
    starts.
    """
    try:
        present = int(read_file(f"/proc/{pid}/oom_score_adj") or b"0")
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(str(min(MAX_SCORE, present + SCORE_RAISE)))
    except (OSError, ValueError):
        return  # it has exited, or /proc may not be written: the kernel then chooses by size alone


def _own_pids() -> list[int]:
    server = process_names.forkserver_pid()
    return [os.getpid(), *([server] if server is not None else [])]
