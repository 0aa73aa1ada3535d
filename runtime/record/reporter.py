"""Reports of the supervisor: events for the journal and the history, one-line messages for the user.

Every part of the supervisor that reports something uses this object. Does not decide what is worth a message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from grpo_run.runtime.record.live_history import LiveHistory


class Reporter:
    """Writes events and messages.

    Args:
        live: journal and history of the run.
        directory: the run directory, for messages.
        notify: shows a one-line message to the user.
    """

    def __init__(self, live: LiveHistory, directory: str, notify: Callable[[str], None]) -> None:
        self._live = live
        self._directory = directory
        self.notify = notify
        self._warned: set[Hashable] = set()

    def begin_attempt(self) -> None:
        """Allow messages that appear once per attempt to appear again."""
        self._warned.clear()

    def write(self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        """Append an event to the journal and apply it to the history."""
        if not self._live.write(event, rank=rank, step=step, **fields) and self._first_time("journal"):
            self.notify(
                f"cannot write to {self._directory}, the disk may be full: journal and evidence are incomplete"
            )

    def warn(self, rank: int | None, text: str) -> None:
        """Show a warning and append it to the journal."""
        self.write("warning", rank=rank, text=text)
        self.notify(text)

    def warn_once(self, rank: int, subject: str, text: str) -> None:
        """Warn once per attempt, rank and subject."""
        if self._first_time((rank, subject)):
            self.warn(rank, text)

    def _first_time(self, key: Hashable) -> bool:
        first = key not in self._warned
        self._warned.add(key)
        return first
