"""Reports of the supervisor: events for the journal and the live history, messages for the user.

Every part of the supervisor that reports something uses the `Reporter`. The supervisor decides from its
live history, so an event that it writes counts immediately, even if the disk does not accept it. The reader
skips the supervisor's own lines afterwards: every event is applied exactly once. Other commands replay the
file (`History.of`). Does not decide what is worth a message.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

from grpo_run.runtime.event import AnyEvent, Event
from grpo_run.runtime.history.events import AdviceGiven, WarningGiven
from grpo_run.runtime.history.history import History, HistoryPart
from grpo_run.runtime.history.journal import Journal, JournalReader


class LiveHistory:
    """A journal that is written to, and the history replayed from it.

    Args:
        path: the journal; events that earlier supervisors and ranks have written are replayed.
        log: called with each event from now on, after it was applied.
        parts: of the history, which features replay.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        *,
        log: Callable[[Event], None] = lambda event: None,
        parts: Iterable[HistoryPart] = (),
    ) -> None:
        self.journal = Journal(path, run_id)
        self.history = History(parts=tuple(parts))
        self._reader = JournalReader(path, self.history.decoder)
        self._followers: list[tuple[type[Event], Callable[[Any], None]]] = []
        self._log = log
        for event in self._reader.new():
            self.history.apply(event)

    def follow(self, kind: type[AnyEvent], receive: Callable[[AnyEvent], None]) -> None:
        """Call a function with each event of a kind that another process appends from now on, after it was
        applied.
        """
        self._followers.append((kind, receive))

    def write(self, event: Event) -> bool:
        """Append an event and apply it to the history.

        Events that ranks have written before are applied first.

        Returns:
            whether the disk accepted the event. The history contains it in either case.
        """
        entry = self.journal.entry(event)
        self.read_ranks()
        accepted = self.journal.append(entry)
        if accepted:
            self._reader.skip(entry.line)
        self.history.apply(entry.event)
        self._log(entry.event)
        return accepted

    def read_ranks(self) -> None:
        """Apply the events that ranks have appended since the last call."""
        for event in self._reader.new():
            self.history.apply(event)
            self._log(event)
            for kind, receive in self._followers:
                if isinstance(event, kind):
                    receive(event)


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
        live.follow(WarningGiven, self._show)

    def begin_attempt(self) -> None:
        """Allow messages that appear once per attempt to appear again."""
        self._warned.clear()

    def write(self, event: Event) -> None:
        """Append an event to the journal and apply it to the history."""
        if not self._live.write(event) and self._first_time("journal"):
            self.notify(
                f"cannot write to {self._directory}, the disk may be full: journal and evidence are"
                " incomplete"
            )

    def warn(self, rank: int | None, text: str) -> None:
        """Show a warning and append it to the journal."""
        self.write(WarningGiven(rank=rank, text=text))
        self.notify(text)

    def advise(self, subject: str, text: str) -> None:
        """Show an advice and append it to the journal, from which status and reports repeat it."""
        self.write(AdviceGiven(subject=subject, text=text))
        self.notify(text)

    def warn_once(self, rank: int, subject: str, text: str) -> None:
        """Warn once per attempt, rank and subject."""
        if self._first_time((rank, subject)):
            self.warn(rank, text)

    def _show(self, warning: WarningGiven) -> None:
        """Show a warning of a rank, unless it is for the journal only."""
        if warning.shown:
            self.notify(warning.text)

    def _first_time(self, key: Hashable) -> bool:
        first = key not in self._warned
        self._warned.add(key)
        return first
