"""What shows a run while it lasts: the protocol that `launch` calls, and a display of plain lines.

`grpo-run launch` has one of its own, with a progress line, the output of ranks and a metrics server
(`cli/launching/_display.py`); nothing in `runtime/` knows how a run is drawn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes.output import Printer

StatusReader = Callable[[], RunStatus]


class Screen(Printer, Protocol):
    """Shows progress, messages and output of ranks. Called from any thread; nothing waits for a reader."""

    def start(self, status: StatusReader) -> None:
        """Start to show progress and faults. Faults that are in the history already are not shown again."""

    def notify(self, text: str) -> None:
        """Show one message, after the faults that came before it."""

    def show_faults(self) -> None:
        """Show the faults whose action is decided: the next attempt begins."""

    def stop(self) -> None:
        """Show what is left to show, and no progress any more: the ranks have ended."""

    def show_end(self, sentence: str, *, wrong_usage: bool, run_directory: Path) -> None:
        """Show how the run has ended.

        Args:
            wrong_usage: the user has to correct a setting: the sentence is all there is to say.
        """


class Display(Protocol):
    """Shows one run. The methods are called in this order."""

    def reserve(self) -> None:
        """Take what the launch may be refused for, such as a port, before anything is created.

        Raises:
            UsageError: it cannot be had.
        """

    def begin(self, config: RunConfig, tell: Callable[[str], None]) -> Screen:
        """Take over standard output and error.

        Args:
            tell: receives what is to be sent to `--notify`: faults, recoveries, and how the run has ended.
        """

    def announce(self, directory: RunDirectory, status: StatusReader) -> None:
        """Say where the run is. The ranks have not been started."""

    def linger(self, *, ended_at: float, until: float, interrupted: Callable[[], bool]) -> None:
        """Let others read the last state.

        Args:
            ended_at, until: when the run ended, and when to leave, in monotonic seconds.
            interrupted: whether to leave now.
        """

    def finish(self, interrupted: Callable[[], bool]) -> None:
        """Give standard output and error back, after what waits to be printed, unless `interrupted`."""

    def release(self) -> None:
        """Give back what `reserve` has taken. Also called if the run has not begun."""


class LineDisplay:
    """Prints messages and the end of a run as lines to standard error; the output of ranks is in their files
    only.
    """

    def reserve(self) -> None:
        """Nothing is needed."""

    def begin(self, config: RunConfig, tell: Callable[[str], None]) -> LineDisplay:
        """It is the screen, too."""
        self._tell = tell
        return self

    def announce(self, directory: RunDirectory, status: StatusReader) -> None:
        """See `Display`."""
        self.notify(f"run in {directory.path}")

    def start(self, status: StatusReader) -> None:
        """Progress is not shown."""

    def notify(self, text: str) -> None:
        """See `Display`."""
        print(f"grpo-run: {text}", file=sys.stderr, flush=True)

    def show_faults(self) -> None:
        """Faults are in the journal and the result."""

    def stop(self) -> None:
        """Nothing is left."""

    def show_end(self, sentence: str, *, wrong_usage: bool, run_directory: Path) -> None:
        """See `Display`."""
        self._tell(sentence)
        self.notify(sentence)

    def linger(self, *, ended_at: float, until: float, interrupted: Callable[[], bool]) -> None:
        """Nobody reads."""

    def finish(self, interrupted: Callable[[], bool]) -> None:
        """Nothing waits."""

    def release(self) -> None:
        """Nothing was taken."""

    def rank_line(self, rank: int, descriptor: int, line: str) -> None:
        """Show what the guard says in a rank, and nothing else."""
        if line.startswith("grpo-run: "):
            print(line, file=sys.stderr, flush=True)

    def rank_bytes(self, rank: int, descriptor: int, data: bytes) -> None:
        """Bytes are not passed on."""

    def rank_file(self, rank: int, descriptor: int, path: Path, start: int) -> None:
        """Files are not passed on."""

    def takes_bytes(self, descriptor: int) -> bool:
        """Lines are taken."""
        return False

    def has_room(self, descriptor: int) -> bool:
        """Nothing waits."""
        return True
