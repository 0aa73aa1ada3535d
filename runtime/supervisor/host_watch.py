"""Host memory in the supervisor: protection, samples, relief, and kills by the kernel.

Called at the supervisor's start, for each attempt, and at every poll. Lets the kernel prefer ranks to the
supervisor when it must kill a process, keeps the last sample on disk, and tells the incident investigation
which ranks the kernel has killed. When memory is short (`watchdog/memory/host_pressure.py`), `MemoryRelief`
acts, from the mildest measure to a restart:

    short          snapshots in memory that are on disk, or superseded, are freed; the newest one is drained
                   and freed too; the ranks free their caches; no memory is taken for snapshots
    running out    the ranks agree on a step, save and exit, and are started again before the kernel kills one

The restart saves into a slot that has its memory already, or directly to disk. It is left out if it cannot be
made without loss, or if the last one was only some steps ago.

Does not make verdicts.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Collection, Mapping

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.events import AttemptEnded, MemoryFreed, MemoryRestart, MemoryShort
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import read_memory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.memory.host_accounting import HostMemory
from grpo_run.runtime.memory.host_last_sample import LastSample
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.headroom import MEMORY_RESERVE
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.stop import StopRequest
from grpo_run.runtime.supervisor.stop_means import StopMeans
from grpo_run.runtime.upstream import process_names
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.memory.host_pressure import LEAST_FREE_BYTES, Growth, Urgency, is_short, shortage
from grpo_run.watchdog.memory.host_reading import groups_of
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, describe_use
from grpo_run.watchdog.observation import Exit, Slot
from grpo_run.watchdog.processes import read_file
from grpo_run.watchdog.text import size_text

CALM_SECONDS = 30.0
"""Memory counts as short for so long after the last sample that showed it."""
FREE_SECONDS = 1.0
"""Between two looks at what can be freed."""
LEAST_STEPS = 5
"""Steps that must follow a restart for memory before another one."""
EAGER_RESTARTS = 2
"""How many restarts of a run are made early. If they do not help, the growth ends by itself or is no leak of
the ranks, and only a kill that is certain is a reason for a further one.
"""


class MemoryRelief:
    """The response of one run. Times are monotonic seconds.

    Args:
        drains: the run's snapshots in memory; None if there are none.
    """

    def __init__(self, drains: DrainScheduler | None, reporter: Reporter, history: History) -> None:
        self._drains = drains
        self._reporter = reporter
        self._history = history
        self._growth = Growth()
        self._short_at: float | None = None
        self._free_at = 0.0
        self.restarts = False
        """The ranks of this attempt have been asked to save and exit, to be started again."""
        self.leaves_little = False
        """So little memory was free in this attempt that no more was taken for snapshots."""

    def begin_attempt(self) -> None:
        """Begin with the ranks of a new attempt."""
        self._growth = Growth()
        self._end()
        self.restarts = self.leaves_little = False

    def record(
        self,
        sample: HostSample,
        attempt: Attempt,
        board: Board,
        now: float,
        *,
        may_restart: Callable[[], bool],
    ) -> None:
        """Take a sample into account, and act.

        Args:
            sample: in which every rank has its memory.
            may_restart: whether the ranks would agree on a step and save.
        """
        loads = attempt.committed == (0, 0)
        if not loads:
            self._growth.record(sample, attempt.committed, now)
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
        if loads or self.restarts or nearest is None or not is_short(nearest, len(sample.ranks)):
            return
        urgency = self._growth.urgency(nearest)
        if urgency is not Urgency.none and self._is_due(urgency, attempt) and may_restart():
            self._restart(nearest, attempt, board)

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

    def _is_due(self, urgency: Urgency, attempt: Attempt) -> bool:
        """Whether a further restart is worth it: progress since the last one, and not early for the third
        time.
        """
        record = self._history.memory_restarts
        if record.last is not None:
            call, step = record.last
            if attempt.committed[0] == call and attempt.committed[1] < step + LEAST_STEPS:
                return False
        return urgency is Urgency.late or record.count < EAGER_RESTARTS

    def _restart(self, nearest: LimitUse, attempt: Attempt, board: Board) -> None:
        self.restarts = True
        free = size_text(nearest.limit_bytes - nearest.working_set_bytes)
        sentence = (
            f"memory runs out: the ranks grow with every step, and {free} of {size_text(nearest.limit_bytes)}"
            f" of {nearest.name} are left; they save and restart before the kernel kills one"
        )
        call, step = attempt.committed
        self._reporter.write(MemoryRestart(step=step, train_call=call, sentence=sentence))
        self._reporter.notify(sentence)
        if self._drains is not None:
            self._drains.memory_is_short = False  # starting the drain worker takes memory, too
        board.request_stop()


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
        stop: of the run; no ranks are started again once it is requested.
    """

    def __init__(
        self,
        run: RunDirectory,
        config: RunConfig,
        drains: DrainScheduler | None,
        reporter: Reporter,
        history: History,
        stop: StopRequest,
    ) -> None:
        self._config = config
        self._stop = stop
        self._staging = drains.staging if drains is not None else None
        self._history = history
        self._relief = MemoryRelief(drains, reporter, history)
        self._exited_at: float | None = None
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
        """Return whether the ranks have saved and exited because memory runs out, so that they are to be
        started again.

        One that does not exit after all have saved is not waited for longer than after a stop.
        """
        if not self._relief.restarts or self._stop.requested or not attempt.exits.stopped:
            return False
        if self._exited_at is None:
            self._exited_at = now
        if ranks.alive and now - self._exited_at < self._config.timeouts.stop_seconds:
            return False
        self._reporter.write(AttemptEnded(cause="memory_short", action="restart"))
        return True

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

    def _may_restart(self, attempt: Attempt, slots: Mapping[int, Slot | None]) -> bool:
        """Whether all ranks are on this node and would agree on a step and save, and the user allows
        restarts.
        """
        return (
            not self._stop.requested
            and self._config.budget.failures_without_progress > 0
            and attempt.world_size == len(attempt.local_rank_of)
            and self._stop.means(attempt, slots) is StopMeans.vote
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
