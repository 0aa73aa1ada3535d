"""What the supervisor does when host memory runs short, from the mildest measure to a restart.

    short          snapshots in memory that are on disk, or superseded, are freed; the newest one is drained and freed, too; the
                   ranks free their caches; no memory is taken for snapshots (`staging.headroom`)
    running out    the ranks agree on a step, save and exit, and are started again: before the kernel kills one

When memory is short and when it runs out is decided in `watchdog.memory.host_pressure`. The restart saves into a slot that
has its memory already, or directly to disk. It is left out if it cannot be made without loss, or if the last one was only some steps ago. Called by
`host_watch.py` for each sample.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.headroom import MEMORY_RESERVE
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.watchdog.memory.host_pressure import Growth, Urgency, is_short, shortage
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, describe_use
from grpo_run.watchdog.text import size_text

CALM_SECONDS = 30.0
"""Memory counts as short for so long after the last sample that showed it."""
FREE_SECONDS = 1.0
"""Between two looks at what can be freed."""
LEAST_STEPS = 5
"""Steps that must follow a restart for memory before another one."""
EAGER_RESTARTS = 2
"""How many restarts of a run are made early. If they do not help, the growth ends by itself or is no leak of the ranks, and
only a kill that is certain is a reason for a further one."""


class MemoryRelief:
    """The response of one run. Times are monotonic seconds.

    Args:
        drains: the run's snapshots in memory; None if there are none.
    """

    def __init__(
        self,
        drains: DrainScheduler | None,
        reporter: Reporter,
        history: History,
    ) -> None:
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
            attempt: of the ranks.
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
                self._reporter.write("memory_freed", size_bytes=freed_bytes)
        if loads or self.restarts or nearest is None or not is_short(nearest, len(sample.ranks)):
            return
        urgency = self._growth.urgency(nearest)
        if urgency is not Urgency.none and self._is_due(urgency, attempt) and may_restart():
            self._restart(nearest, attempt, board)

    def _begin(self, text: str, sample: HostSample, board: Board) -> None:
        use = describe_use(sample, sample.nearest)
        users = f" ({use})" if use else ""
        self._reporter.write("memory_short", sentence=f"{text}{users}")
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
        """Whether a further restart is worth it: progress since the last one, and not early for the third time."""
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
            f"memory runs out: the ranks grow with every step, and {free} of {size_text(nearest.limit_bytes)} of"
            f" {nearest.name} are left; they save and restart before the kernel kills one"
        )
        call, step = attempt.committed
        self._reporter.write("memory_restart", step=step, train_call=call, sentence=sentence)
        self._reporter.notify(sentence)
        if self._drains is not None:
            self._drains.memory_is_short = False  # starting the drain worker takes memory, too
        board.request_stop()


def _leaves_little(use: LimitUse) -> bool:
    return use.limit_bytes - use.working_set_bytes < MEMORY_RESERVE.of(use.limit_bytes)
