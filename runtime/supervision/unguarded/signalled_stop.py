"""A stop by SIGTERM: the ranks' own handlers run, for a bounded time.

With `Accelerator.save_state`, no rank is signaled during a save: the ranks are told that they are about to be ended, so
that no further save begins, and are signaled when none is under way. The supervisor polls it. Kills nothing: what is
left at the deadline is terminated by the agent.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.supervision.unguarded.own_saves import is_saving
from grpo_run.watchdog.observation import Slot

AFTER_SAVE_SECONDS = 1.0
"""Time for what a script does after a save, such as a mark that it is complete."""


class SignalledStop:
    """State of the stop. Times are monotonic seconds.

    Args:
        handler_seconds: how long the ranks may take after SIGTERM.
    """

    def __init__(self, handler_seconds: float) -> None:
        self._handler_seconds = handler_seconds
        self._deadline: float | None = None
        self._announced_at: float | None = None

    @property
    def sent(self) -> bool:
        """Whether SIGTERM has been sent."""
        return self._deadline is not None

    def begin_attempt(self) -> None:
        """A new attempt begins: its ranks have not been signaled."""
        self._deadline = self._announced_at = None

    def after_a_save(
        self, ranks: RankGroup, board: Board, slots: Mapping[int, Slot | None], *, now: float, saved: bool
    ) -> None:
        """Signal the ranks once they have saved and no further save is under way.

        Args:
            saved: a save has become complete since the last call.
        """
        if self._announced_at is not None and is_saving(slots):
            # it has begun just before it could know, and may need all ranks: let the others enter it
            self._announced_at = None
            board.announce_end(False)
        elif self._announced_at is not None and now - self._announced_at >= AFTER_SAVE_SECONDS:
            self.send(ranks, now)
        elif self._announced_at is None and saved:
            self._announced_at = now
            board.announce_end(True)

    def send(self, ranks: RankGroup, now: float) -> None:
        """Send SIGTERM now."""
        self._deadline = now + self._handler_seconds
        ranks.request_exit()

    def expire(self) -> None:
        """End the wait: the user has asked again."""
        if self._deadline is not None:
            self._deadline = 0.0

    def postpone(self, seconds: float) -> None:
        """Move the deadline by so many seconds, in which nothing was observed."""
        if self._deadline is not None:
            self._deadline += seconds

    def is_over(self, ranks: RankGroup, now: float) -> bool:
        """Return whether all ranks have exited, or their time is over."""
        assert self._deadline is not None
        return not ranks.alive or now >= self._deadline
