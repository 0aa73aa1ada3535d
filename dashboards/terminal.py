"""The terminal of `grpo-run launch`: ranks' lines with a prefix, the supervisor's own, and one line of progress.

On a terminal the progress line stays at the bottom; in a file it is printed at most every 15 s, and only when it
changed. Ranks' lines go to standard output as torchrun's do, everything of ours to standard error.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

from rich.console import Console
from rich.live import Live
from rich.text import Text

from grpo_run.runtime.record.history import History

OURS = "grpo-run: "
"""Start of a line that the guard prints in a rank: a warning or an event, shown whatever rank it is."""
REFRESH_SECONDS = 0.5
PLAIN_SECONDS = 15.0


class _Console(Console):
    """A console whose closing is not the run's end."""

    def on_broken_pipe(self) -> None:
        """Fall silent; rich itself would end the process."""
        self.quiet = True


class Terminal:
    """Thread-safe. `shown` says which ranks' lines are printed (their files hold all of them).

    Args:
        progress: gives the present progress line, "" for none yet.
    """

    def __init__(self, *, shown: frozenset[int], progress: Callable[[], str]) -> None:
        self._shown = shown
        self._progress = progress
        self._console = _Console(stderr=True, highlight=False, soft_wrap=True)
        self._live: Live | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="grpo-run-terminal")

    def start(self) -> None:
        """Begin to show progress."""
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        self._thread.start()

    def stop(self) -> None:
        """Take the progress line away."""
        self._stop.set()
        self._thread.join(2.0)
        if self._live is not None:
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()

    def rank_line(self, rank: int, line: str) -> None:
        """One line of a rank's output."""
        if rank not in self._shown:
            if line.startswith(OURS):
                self.say(line.removeprefix(OURS))
            return
        with contextlib.suppress(OSError, ValueError):  # nobody listens any more; the rank's file has it
            if self._live is not None:
                self._console.print(Text(f"[rank{rank}] {line}"))
            else:
                sys.stdout.write(f"[rank{rank}] {line}\n")
                sys.stdout.flush()

    def say(self, text: str) -> None:
        """One line of the supervisor's own; a text of several (a traceback) is shown as it is."""
        with contextlib.suppress(OSError, ValueError):  # a terminal that is gone must not take the run along
            self._console.print(Text(text if "\n" in text else f"grpo-run: {text}"))

    def _loop(self) -> None:
        last, waited = "", PLAIN_SECONDS
        while not self._stop.wait(REFRESH_SECONDS):
            line = self._progress()
            waited += REFRESH_SECONDS
            if self._live is not None:
                with contextlib.suppress(OSError, ValueError):
                    self._live.update(Text(f"grpo-run: {line}", style="dim"))
            elif line and line != last and waited >= PLAIN_SECONDS:
                self.say(line)
                last, waited = line, 0.0


def progress_line(history: History) -> str:
    """Where the run stands, in one line; "" before the first committed step."""
    if not history.step:
        return ""
    parts = [
        f"step {history.step}/{history.target_steps}" if history.target_steps else f"step {history.step}"
    ]
    if history.reward is not None:
        parts.append(f"reward {history.reward:.3f}")
    if history.checkpoint is not None:
        parts.append(f"checkpoint {history.checkpoint.step}")
    healed = sum(1 for recovery in history.recoveries if recovery.recovery_seconds is not None)
    if healed:
        parts.append(f"{healed} fault{'s' if healed > 1 else ''} recovered")
    return " · ".join(parts)
