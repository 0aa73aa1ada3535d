"""When the next snapshot is due: every N steps as asked, or as often as pays (`runtime.record.failure_rate`).

The `Saver` of each `train()` call owns one; the guard's callback asks it after each step. With a fixed N every rank
computes the same steps. Otherwise rank 0 measures costs, and its request is voted on. Does not take snapshots.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.runtime.record.failure_rate import steps_between_snapshots

VOTE_STEPS = 2
"""A wish is acted on after the step that follows the one it was voted with: only then can it be seen to be unheard."""
TRIED_STEPS = 2
"""The first snapshot takes its memory from the kernel, the second shows what one costs."""
CHANGE_WORTH_SAYING = 2.0


class Cadence:
    """The snapshot schedule of one `train()` call.

    Args:
        every: steps between snapshots; None to choose from measured costs, 0 for never.
        failure_seconds: mean time between failures of this run.
        notify: called with a message, the chosen interval in steps, the cost of a snapshot and the length of a
            step, both in seconds, when the choice changes by a factor of two.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        every: int | None,
        *,
        failure_seconds: float,
        notify: Callable[[str, int, float, float], None],
        clock: Callable[[], float],
    ) -> None:
        self._every = every
        self._failure_seconds = failure_seconds
        self._notify = notify
        self._clock = clock
        self.due = False
        """Whether all ranks take a snapshot after the step that `decide` was called for."""
        self._last_step = 0
        self._last_at = clock()
        self._ask_from = 0
        self._unheard_steps = VOTE_STEPS
        self._taken = 0
        self._chosen = 1
        self._said: int | None = None

    def begin(self, first_step: int) -> None:
        """Start counting: training begins after `first_step`."""
        self._last_step = self._ask_from = first_step
        self._last_at = self._clock()

    def decide(self, step: int, *, agreed: bool) -> None:
        """Set `due` for a finished step.

        Args:
            agreed: whether a vote has carried rank 0's request to all ranks.
        """
        self.due = self.fixed(step) or agreed

    def fixed(self, step: int) -> bool:
        """Return whether the fixed interval schedules a snapshot after this step; equal on every rank."""
        return bool(self._every) and step % self._every == 0  # type: ignore[operator]

    def wanted(self, step: int) -> bool:
        """Due as soon as all ranks have agreed; asked on rank 0. A wish that is not heard is repeated ever more rarely."""
        if self._every is not None or step - self._last_step < self._chosen or step < self._ask_from:
            return False
        self._ask_from = step + self._unheard_steps
        self._unheard_steps *= 2
        return True

    def taken(self, step: int, cost_seconds: float) -> None:
        """A checkpoint of `step` is in memory, and training was blocked for `cost_seconds`."""
        now = self._clock()
        steps, seconds = step - self._last_step, now - self._last_at - cost_seconds
        self._last_step, self._last_at = step, now
        self._ask_from, self._unheard_steps = step, VOTE_STEPS
        self._taken += 1
        if self._every is not None or self._taken < TRIED_STEPS or steps < 1:
            return
        step_seconds = max(0.0, seconds) / steps
        self._chosen = steps_between_snapshots(cost_seconds, self._failure_seconds, step_seconds)
        said = self._said
        if said is None or not said / CHANGE_WORTH_SAYING < self._chosen < said * CHANGE_WORTH_SAYING:
            self._said = self._chosen
            self._notify(
                f"a snapshot in memory every {self._chosen} steps: one blocks for {cost_seconds * 1000:.0f} ms, a step takes"
                f" {step_seconds:.2f} s, a failure is expected every {self._failure_seconds / 3600:.1f} h (Young's optimum)",
                self._chosen,
                cost_seconds,
                step_seconds,
            )
