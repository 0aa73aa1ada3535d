"""The stop of a run: who requested it and when, how the ranks are stopped, and their deadline.

A signal handler may only note a request; the supervisor handles it at its next poll. `stop_means.py`
chooses how ranks are stopped. Ranks of a no-trainer script get SIGTERM, and their own handlers run for a
bounded time. Kills nothing: the agent terminates what is left at the deadline.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Collection, Mapping

from grpo_run.runtime.history.history import History
from grpo_run.runtime.launch.config import Timeouts
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.processes.starting import UNNAMED
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.stop_means import (
    StopMeans,
    choose,
    describe,
    returned_code,
    stop_code,
    uses_no_trainer,
)
from grpo_run.watchdog.observation import Exit, RankState, Slot
from grpo_run.watchdog.text import duration_text

LEAST_STOP_SECONDS = 5.0
"""Time that ranks have for a stop, however short their steps are."""
STOP_STEPS = 2
"""A stop takes effect within so many steps."""
ANNOUNCING = frozenset(number.name for number in signal.Signals) - {number.name for number in UNNAMED}
"""Signals that a scheduler is told to send some time before it sends SIGTERM."""
SAME_SECONDS = 2.0
"""A scheduler may send one SIGTERM by two ways, by the process's host and by its job, milliseconds apart."""


class StopRequest:
    """State of a stop. Times are monotonic seconds.

    Args:
        timeouts: how long ranks may take to agree on a step, save and exit, or to handle SIGTERM.
    """

    def __init__(self, timeouts: Timeouts, history: History) -> None:
        self._timeouts = timeouts
        self._history = history
        self._noted: list[str] = []
        self._requested_at: float | None = None
        self._deadline = 0.0
        self._one_term_until = 0.0
        """SIGTERM before this time is no further request."""
        self._said_short = False
        self._handlers_until: float | None = None
        """The deadline after SIGTERM; None until it was sent."""

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requested_at is not None

    @property
    def signalled(self) -> bool:
        """Whether the ranks were sent SIGTERM."""
        return self._handlers_until is not None

    @property
    def noted(self) -> bool:
        """Whether a request was noted that is not handled yet."""
        return bool(self._noted)

    def note(self, reason: str) -> None:
        """Note a request. Safe in a signal handler."""
        self._noted.append(reason)

    def take_noted(self) -> list[str]:
        """Return the requests noted since the last call, oldest first."""
        taken = []
        while self._noted:
            taken.append(self._noted.pop(0))
        return taken

    def begin_attempt(self) -> None:
        """A new attempt begins: its ranks have not been signaled."""
        self._handlers_until = None

    def request(self, now: float, reason: str = "") -> bool:
        """Request the stop. A second request moves the deadline to now.

        Returns:
            whether this is the first request.
        """
        if reason == signal.SIGTERM.name:
            repeats, known_until = now < self._one_term_until, now + SAME_SECONDS
            self._one_term_until = min(self._one_term_until, known_until) if repeats else known_until
            if repeats:
                return False
        elif reason in ANNOUNCING:
            self._one_term_until = math.inf
        if self._requested_at is not None:
            self._deadline = now
            if self._handlers_until is not None:
                self._handlers_until = now
            return False
        self._requested_at = now
        self._deadline = now + self._timeouts.stop_seconds
        return True

    def describe(self, attempt: Attempt, slots: Mapping[int, Slot | None] | None) -> str:
        """Return what happens now, for the user.

        Args:
            slots: of the ranks; None if there are none.
        """
        means = StopMeans.end if slots is None else self.means(attempt, slots)
        training = any(
            slot is not None and slot.state is RankState.training for slot in (slots or {}).values()
        )
        return describe(means, self._history, self._timeouts, training=training)

    def means(self, attempt: Attempt, slots: Mapping[int, Slot | None]) -> StopMeans:
        """Return how the ranks are to be stopped now."""
        return choose(attempt.committed, slots, self._history)

    def short_sentence(self) -> str | None:
        """Return that a save has not fitted into `--stop-timeout`, once; None if it has, or the option was
        not given.
        """
        seconds, limit = self._history.save_seconds, self._timeouts.stop_seconds
        if self._said_short or not self._timeouts.stop_is_given or seconds is None or seconds <= limit:
            return None
        self._said_short = True
        return (
            f"a save took {duration_text(seconds)}, and --stop-timeout is {duration_text(limit)}: when that"
            " is over, the checkpoint of a stop may not be complete"
        )

    def poll(
        self, ranks: RankGroup, attempt: Attempt, slots: Mapping[int, Slot | None], *, now: float
    ) -> bool:
        """Signal the ranks if that ends them, and return whether they are to be ended at once."""
        if not self.requested:
            return False
        means = self.means(attempt, slots)
        if means is StopMeans.term and not self.expired(now):
            self.signal(ranks, now)
        return means in (StopMeans.end, StopMeans.term) and not self.signalled

    def signal(self, ranks: RankGroup, now: float) -> None:
        """Send SIGTERM now."""
        self._handlers_until = now + self._timeouts.handler_seconds
        ranks.request_exit()

    def handlers_are_over(self, ranks: RankGroup, now: float) -> bool:
        """Return whether all ranks that were signaled have exited, or their time is over."""
        assert self._handlers_until is not None
        return not ranks.alive or now >= self._handlers_until

    def exit_code(self, ranks: RankGroup, exits: Collection[Exit]) -> int:
        """Return the exit code of a stop by SIGTERM: that of a script without a Trainer, if all ranks have
        the same one.

        A script that has done no work, and may use a Trainer, must be started again.
        """
        no_trainer = self._history.no_trainer.current or uses_no_trainer(self._history)
        code = returned_code(exits) if no_trainer and not ranks.alive else None
        return stop_code(self._history) if code is None else code

    def postpone(self, seconds: float) -> None:
        """Move the deadlines: for so long the supervisor did not run, and the ranks may not have run
        either.
        """
        self._deadline += seconds
        if self._handlers_until is not None:
            self._handlers_until += seconds

    def takes_long(self, now: float, step_seconds: float | None) -> bool:
        """Return whether the stop was requested longer ago than it takes ranks whose steps end.

        Args:
            now: monotonic seconds.
            step_seconds: how long a step usually takes; None if unknown.
        """
        usual = max(LEAST_STOP_SECONDS, STOP_STEPS * (step_seconds or 0.0))
        return self._requested_at is not None and now >= self._requested_at + usual

    def expired(self, now: float) -> bool:
        """Return whether the deadline of the stop has passed."""
        return self._requested_at is not None and now >= self._deadline

    def waited_seconds(self, now: float) -> float:
        """Return how long ago the stop was requested; 0 without a request."""
        return 0.0 if self._requested_at is None else now - self._requested_at
