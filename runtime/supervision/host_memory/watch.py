"""Observe host memory for the supervisor: called at its start, for each attempt, and at every poll.

Lets the kernel prefer ranks to the supervisor when it must kill a process, keeps the last sample on disk, acts when memory
is short (`relief.py`), and tells the incident investigation which ranks the kernel has killed. Does not make verdicts.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Mapping

from grpo_run.runtime import upstream
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.host_memory.accounting import HostMemory
from grpo_run.runtime.host_memory.last_sample import LastSample, read_last_sample
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.reporter import Reporter
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import read_memory
from grpo_run.runtime.staging.draining.drain_scheduler import DrainScheduler
from grpo_run.runtime.supervision.attempts.attempt import Attempt
from grpo_run.runtime.supervision.host_memory.last_end import suspected
from grpo_run.runtime.supervision.host_memory.relief import MemoryRelief
from grpo_run.runtime.supervision.stop import StopRequest
from grpo_run.runtime.supervision.unguarded.stop_means import StopMeans
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.host_memory.kills import KernelKills
from grpo_run.watchdog.host_memory.pressure import LEAST_FREE_BYTES
from grpo_run.watchdog.host_memory.reading import groups_of
from grpo_run.watchdog.host_memory.sample import HostSample
from grpo_run.watchdog.observation import Exit, Slot
from grpo_run.watchdog.processes import read_file

SCORE_RAISE = 50
"""How much more readily the kernel kills a rank, in thousandths of the memory (proc_pid_oom_score_adj(5)): supervisor and
forkserver use less than 5 % of any memory in which ranks train. Raising it needs no privilege."""
MAX_SCORE = 1000
REPLICATED = "ddp"
"""Layout of a checkpoint of which every rank loads all."""


class HostWatch:
    """Watches the host's memory during one run.

    Args:
        run: its directory, which receives the last sample.
        config: of the run.
        drains: writes the run's snapshots in memory to disk; None if there are none.
        stop: of the run; no ranks are started again once it is requested.
        enter: moves a rank into the cgroup of the ranks.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        drains: DrainScheduler | None,
        reporter: Reporter,
        history: History,
        stop: StopRequest,
        enter: Callable[[int], None],
    ) -> None:
        self._enter = enter
        self._config = config
        self._stop = stop
        self._staging = drains.staging if drains is not None else None
        self._history = history
        self._relief = MemoryRelief(drains, reporter, history)
        self._exited_at: float | None = None
        self._board: Board | None = None
        self._reporter = reporter
        self._last = read_last_sample(run.host_memory)
        self._memory = HostMemory(
            staging_bytes=self._staging_bytes,
            own_pids=_own_pids,
            publish=LastSample(run.host_memory).write,
        )

    @property
    def latest(self) -> HostSample | None:
        """The last sample; None before the first."""
        return self._memory.latest

    def begin(self) -> None:
        """Say how the last supervisor has probably ended, and what the kernel would do to this one. Call it before any event."""
        text = suspected(self._last, self._history)
        if text is not None:
            self._reporter.write("memory_oom_suspected", sentence=text)
            self._reporter.notify(text)
        together = next((group for group in groups_of(os.getpid()) if group.kills_whole_group), None)
        if together is not None:
            self._reporter.warn(
                None,
                f"{together.folder} has memory.oom.group=1: if its memory is full, the kernel ends this supervisor together"
                " with the ranks; the next launch then reports it",
            )

    @property
    def spares_memory(self) -> bool:
        """Whether the next attempt is to find as much free memory as possible.

        The kernel has killed a rank, or little was free in the last attempt, or too little for ranks that load: snapshots
        would take their part again.
        """
        recoveries = self._history.recoveries
        failed = bool(recoveries) and recoveries[-1].recovery_seconds is None
        killed = failed and recoveries[-1].cause == Cause.host_oom
        return killed or self._relief.leaves_little or self._loading_may_not_fit()

    def begin_attempt(self, pids: Mapping[int, int]) -> None:
        """Watch the ranks that were just started, by rank."""
        for pid in pids.values():
            self._enter(pid)  # it is in it already if the forkserver is
            prefer_to_kill(pid)
        self._memory.begin_attempt(pids)
        self._relief.begin_attempt()
        self._exited_at = None

    def poll(self, attempt: Attempt, board: Board, slots: Mapping[int, Slot | None], now: float) -> None:
        """Read what is due, and act if memory is short.

        Args:
            slots: of the attempt's ranks.
            now: monotonic seconds.
        """
        self._board = board
        try:
            sampled = self._memory.poll()
            whole = self._memory.whole
            if sampled and whole is not None and not attempt.exits.seen:
                may_restart = functools.partial(self._may_restart, attempt, slots)
                self._relief.record(whole, attempt, board, now, may_restart=may_restart)
        except (OSError, MemoryError) as error:
            text = f"host memory cannot be monitored at present: {error or type(error).__name__}"
            self._reporter.warn_once(0, "host memory", text)

    def restarts(self, ranks: RankGroup, attempt: Attempt, now: float) -> bool:
        """Return whether the ranks have saved and exited because memory runs out, so that they are to be started again.

        One that does not exit after all have saved is not waited for longer than after a stop.
        """
        if not self._relief.restarts or self._stop.requested or not attempt.exits.stopped:
            return False
        if self._exited_at is None:
            self._exited_at = now
        if ranks.alive and now - self._exited_at < self._config.timeouts.stop_seconds:
            return False
        self._reporter.write("attempt_ended", cause="memory_short", action="restart")
        return True

    def kills_of(self, exits: Collection[Exit]) -> KernelKills:
        """Return which of the ranks that have exited the kernel has killed for lack of memory."""
        return self._memory.kills_of(exits)

    def _loading_may_not_fit(self) -> bool:
        """Whether the ranks as they were, and once more what they load, exceed a limit.

        A rank that loads has a tensor of the checkpoint and that of its model or optimizer at the same time. If these are on
        a device, it holds one tensor at a time, and the ranks together less than the checkpoint.
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

    def _may_restart(self, attempt: Attempt, slots: Mapping[int, Slot | None]) -> bool:
        """Whether all ranks are on this node and would agree on a step and save, and the user allows restarts."""
        return (
            not self._stop.requested
            and self._config.budget.failures_without_progress > 0
            and attempt.world_size == len(attempt.place_of_rank)
            and self._stop.means(attempt, slots) is StopMeans.vote
        )

    def _staging_bytes(self) -> int:
        if self._staging is None:
            return 0
        with contextlib.suppress(OSError):  # a slot is being emptied
            return sum(slot.size_bytes() for slot in self._staging.slots)
        return 0


def prefer_to_kill(pid: int) -> None:
    """Raise the score by which the kernel chooses whom to kill when memory is full, for a process and what it starts."""
    try:
        present = int(read_file(f"/proc/{pid}/oom_score_adj") or b"0")
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write(str(min(MAX_SCORE, present + SCORE_RAISE)))
    except (OSError, ValueError):
        return  # it has exited, or /proc may not be written: the kernel then chooses by size alone


def _own_pids() -> list[int]:
    server = upstream.forkserver_pid()
    return [os.getpid(), *([server] if server is not None else [])]
