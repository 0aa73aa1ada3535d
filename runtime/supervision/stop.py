"""The request to stop a run: who asked, since when, and until when the ranks may take to save and exit.

A signal handler may only note a request; the supervisor handles it at its next poll. Does not stop anything
itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.watchdog.observation import RankState, Slot


class StopRequest:
    """State of a stop. Times are monotonic seconds.

    Args:
        timeout_seconds: how long ranks may take to agree on a step, save and exit.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._noted: list[str] = []
        self._requested_at: float | None = None
        self._deadline = 0.0

    @property
    def requested(self) -> bool:
        """Whether a stop was requested."""
        return self._requested_at is not None

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

    def request(self, now: float) -> bool:
        """Request the stop. A second request moves the deadline to now.

        Returns:
            whether this is the first request.
        """
        if self._requested_at is not None:
            self._deadline = now
            return False
        self._requested_at = now
        self._deadline = now + self._timeout_seconds
        return True

    def expired(self, now: float) -> bool:
        """Return whether the deadline of the stop has passed."""
        return self._requested_at is not None and now >= self._deadline

    def waited_seconds(self, now: float) -> float:
        """Return how long ago the stop was requested; 0 without a request."""
        return 0.0 if self._requested_at is None else now - self._requested_at


def nothing_to_save(committed: tuple[int, int], slots: Mapping[int, Slot | None]) -> bool:
    """Return whether no rank has finished a step or a `train()` call in this attempt.

    Args:
        committed: the newest (train call, step) committed in this attempt; (0, 0) for none.
        slots: of the attempt's ranks; None for one that has not written its slot yet.
    """
    return committed == (0, 0) and all(
        slot is None
        or slot.state in (RankState.absent, RankState.starting)
        or (slot.state is RankState.training and slot.train_call == 1 and slot.step <= slot.resumed_step)
        for slot in slots.values()
    )
