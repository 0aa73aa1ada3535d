"""When the next snapshot is due: every N steps, or at the interval that loses the least time.

The `Saver` of each `train()` call owns one; the guard's step vote asks it after each step. With a fixed N
every rank computes the same steps. Otherwise rank 0 measures the cost of a snapshot, computes the interval
with Young's formula and requests snapshots in the step vote. Does not take snapshots.

Young's first-order optimum (CACM 17(9), 1974): with a snapshot that blocks for C seconds and a failure every
M seconds on average, sqrt(2 C M) seconds between snapshots lose the least time. Daly (FGCS 22(3), 2006) shows
that it is accurate for C well below M, which holds for every copy in memory. M is the run's own
(`runtime.history.progress`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

VOTE_STEPS = 2
"""A snapshot is taken one step after its vote; after this many steps a request was not answered."""
WARMUP_SNAPSHOTS = 2
"""The first snapshot allocates memory; the second shows the regular cost."""
NOTIFY_FACTOR = 2.0
"""The interval is reported again when it has changed by this factor."""
MAX_STEPS = 1_000_000
"""More steps than any run has: a measurement of almost no time per step must not overflow."""


def steps_between_snapshots(cost_seconds: float, failure_seconds: float, step_seconds: float) -> int:
    """Return Young's optimum in steps, at least 1 and at most `MAX_STEPS`.

    Args:
        cost_seconds: how long a snapshot blocks training.
        failure_seconds: mean time between failures.
        step_seconds: duration of a step.
    """
    if not step_seconds > 0:
        return 1
    optimum_seconds = math.sqrt(2 * max(0.0, cost_seconds) * max(0.0, failure_seconds))
    return max(1, round(min(optimum_seconds / step_seconds, MAX_STEPS)))


class Cadence:
    """The snapshot schedule of one `train()` call.

    Args:
        every: steps between snapshots; None to choose from measured costs, 0 for never.
        keep_every: steps between snapshots that are kept; 0 for never.
        failure_seconds: mean time between failures of this run.
        notify: called with the chosen interval in steps, the cost of a snapshot and the duration of a step,
            both in seconds, when the interval is chosen and when it has changed by a factor of two.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        every: int | None,
        *,
        keep_every: int = 0,
        failure_seconds: float,
        notify: Callable[[int, float, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._every = every
        self._keep_every = keep_every
        self._failure_seconds = failure_seconds
        self._notify = notify
        self._clock = clock
        self.due = False
        """Whether all ranks take a snapshot after the step that `decide` was called for."""
        self.required = False
        """Whether it must not be left out: on disk if there is no memory."""
        self.kept = False
        """Whether the user has asked for it."""
        self._last_step = 0
        self._last_at = clock()
        self._request_from = 0
        self._retry_steps = VOTE_STEPS
        self._taken = 0
        self._interval = 1
        self._notified_interval: int | None = None

    def begin(self, first_step: int) -> None:
        """Start counting: training begins after `first_step`."""
        self._last_step = self._request_from = first_step
        self._last_at = self._clock()

    def decide(self, step: int, *, agreed: bool, required: bool = False, kept: bool = False) -> None:
        """Set what is due after a finished step.

        Args:
            agreed: whether a vote has carried rank 0's request to all ranks.
            required: the snapshot of a stop, of the user or of the last step.
            kept: the user has asked for it.
        """
        self.kept = kept or bool(self._keep_every and step % self._keep_every == 0)
        self.required = required or self.kept
        self.due = self.fixed(step) or agreed or self.required

    def done(self) -> None:
        """Record that what was due after the step was taken, or was not possible."""
        self.due = self.required = self.kept = False

    def fixed(self, step: int) -> bool:
        """Return whether the fixed interval schedules a snapshot after this step; equal on every rank."""
        return bool(self._every) and step % self._every == 0  # type: ignore[operator]

    def wanted(self, step: int) -> bool:
        """Return whether rank 0 requests a snapshot in the vote of this step.

        A request that is not answered by a snapshot is repeated after twice as many steps each time.
        """
        if self._every is not None or step - self._last_step < self._interval or step < self._request_from:
            return False
        self._request_from = step + self._retry_steps
        self._retry_steps *= 2
        return True

    def taken(self, step: int, cost_seconds: float) -> None:
        """Record a snapshot, and choose the next interval.

        Args:
            step: the snapshot's step.
            cost_seconds: how long it blocked training.
        """
        now = self._clock()
        steps, seconds = step - self._last_step, now - self._last_at - cost_seconds
        self._last_step, self._last_at = step, now
        self._request_from, self._retry_steps = step, VOTE_STEPS
        self._taken += 1
        if self._every is not None or self._taken < WARMUP_SNAPSHOTS or steps < 1:
            return
        step_seconds = max(0.0, seconds) / steps
        self._interval = steps_between_snapshots(cost_seconds, self._failure_seconds, step_seconds)
        notified = self._notified_interval
        if notified is None or not notified / NOTIFY_FACTOR < self._interval < notified * NOTIFY_FACTOR:
            self._notified_interval = self._interval
            self._notify(self._interval, cost_seconds, step_seconds)
