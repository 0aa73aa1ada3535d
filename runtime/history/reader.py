"""Reads a run directory without its supervisor: at any moment, also of a crashed or finished run or a copy.

Used by every command that shows a run. Opens files for reading only and takes no lock, so that looking never
makes a supervisor or a rank wait. A run whose supervisor exited without writing how the run ended is
`unknown`, never running. Changes and decides nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.history import DECODER, History, HistoryPart
from grpo_run.runtime.history.host_status import read_hosts
from grpo_run.runtime.history.journal import JournalReader
from grpo_run.runtime.history.progress import newest_commit
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import RunStatus, observe, read_memory
from grpo_run.runtime.history.summary import summarize
from grpo_run.runtime.memory.host_last_sample import read_last_sample
from grpo_run.runtime.processes.identity import ProcessIdentity
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import Slot

JOURNAL_BEHIND_SECONDS = 5.0
"""Age of the journal's last line. A live supervisor writes a committed step within a tenth of a second."""


TAIL_BYTES = 128
"""Enough for the times of a journal's line, which no other journal has at this place."""


MakeParts = Callable[[], Sequence[HistoryPart]]
"""Makes the parts of a history that features replay."""


class Follower(Protocol):
    """Keeps more of a journal than the history does, such as curves."""

    def restart(self) -> None:
        """Forget everything: the journal is read from its beginning again."""

    def apply(self, event: Event, history: History, /) -> None:
        """Take one event, which the history has already."""


class RunReader:
    """Reader of one run. A second look reads only what has been added to the journal since the first.

    Args:
        run: its directory.
        follower: takes every event after the history.
        parts: makes what features replay; see `runtime/launching/reading.py`.
    """

    def __init__(
        self, run: RunDirectory, follower: Follower | None = None, *, parts: MakeParts = tuple
    ) -> None:
        self._run = run
        self._follower = follower
        self._parts = parts
        self._begin()
        self._last_read = b""

    def _begin(self) -> None:
        self._history = History(parts=tuple(self._parts()))
        self._journal = JournalReader(self._run.journal, self._history.decoder)

    def history(self) -> History:
        """Return the history of the run up to now. It is the same object while the journal only grows.

        Raises:
            RunDirectoryError: the journal cannot be read.
        """
        if self._tail() != self._last_read:  # put back from a copy, or truncated
            self._begin()
            if self._follower is not None:
                self._follower.restart()
        for event in self._journal.new():
            self._history.apply(event)
            if self._follower is not None:
                self._follower.apply(event, self._history)
        self._last_read = self._tail()
        return self._history

    def last_memory(self) -> tuple[RankMemory | None, ...]:
        """Return what each rank had measured of its memory when the board was last written; empty without a
        board.
        """
        try:
            return read_memory(Board.open(self._run.board))
        except RunDirectoryError:
            return ()  # of another version, or not in a copy

    def _tail(self) -> bytes:
        """What the journal has before the position up to which it was read."""
        position = self._journal.position
        try:
            with open(self._run.journal, "rb", buffering=0) as file:
                file.seek(max(0, position - TAIL_BYTES))
                return file.read(min(position, TAIL_BYTES))
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise RunDirectoryError(f"{self._run.journal} cannot be read: {error.strerror}") from error

    def read(self) -> RunStatus:
        """Return the status of the run.

        Raises:
            RunDirectoryError: it is not a run directory, or cannot be read.
        """
        run = self._run
        fields = run.read_run()
        history = self.history()
        supervisor = run.supervisor()
        memory = fields.get("snapshot_directory")
        if supervisor is None and not (memory and Path(memory).is_dir()):
            history.snapshot_step = None  # its memory was freed, or the machine has been started again
        observed: dict[str, Any] = {}
        # pages of a board on another machine are as old as this machine's cache, and its clock is another
        if supervisor is not None and supervisor.is_on_this_machine:
            observed["host_memory"] = read_last_sample(run.host_memory)
            observed["hosts"] = read_hosts(run.hosts)
            with contextlib.suppress(RunDirectoryError):
                board = Board.open(run.board)
                observed |= observe(board) | {"awaited": board.read_awaited()}
        state = history.state
        if supervisor is None and history.exit_code is None:
            state = "unknown"
        sentences = (
            summarize(state, history),
            _elsewhere(supervisor),
            _journal_behind(history, observed.get("slots", ())),
        )
        return RunStatus(
            run_id=str(fields.get("run_id", run.path.name)),
            state=state,
            sentence=" ".join(filter(None, sentences)),
            history=history,
            supervisor_pid=supervisor.pid if supervisor is not None else None,
            **observed,
        )


def _elsewhere(supervisor: ProcessIdentity | None) -> str | None:
    if supervisor is None or supervisor.is_on_this_machine:
        return None
    return (
        f"Its supervisor is on another machine ({supervisor.host or 'unknown'}), where `grpo-run status`"
        " shows the ranks."
    )


def _journal_behind(history: History, slots: tuple[Slot | None, ...]) -> str | None:
    """Return a warning if the board shows steps that the journal lacks, as on a full disk."""
    commit = newest_commit(dict(enumerate(slots)), world_size=0)
    if commit is None or time.time() - (history.wall.last or 0.0) < JOURNAL_BEHIND_SECONDS:
        return None
    # the supervisor may not have polled the newest step yet
    if (commit.train_call, commit.step) <= (history.train_call, history.step + 1):
        return None
    return (
        f"The journal is behind: the ranks have reached step {commit.step}. The disk of the run directory may"
        " be full, and later faults are not recorded here."
    )


def read_journal(path: Path) -> Iterator[Event]:
    """Yield all events of a journal in file order. See `JournalReader.new`."""
    return JournalReader(path, DECODER).new()
