"""Tracebacks of ranks that failed, held back until it is known which rank failed first.

When a rank raises, its peers lose their connection to it and print errors of their own, often before the
cause is known. `terminal.py` holds these lines back, shows the culprit's traceback first, and then releases
what is neither a repetition nor a lost connection. The ranks' files hold all of it. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.watchdog.diagnosis.exits import reports_lost_peer

FIRST_LINES = ("Traceback (most recent call last):", "  + Exception Group Traceback (most recent call last):")
MAX_HELD_LINES = 2000
"""More lines of one rank are not held back: they are no traceback of a script."""


class HeldTracebacks:
    """The fatal tracebacks of the ranks of one attempt.

    Args:
        has_failed: whether a rank's script has raised an exception that ended it.
    """

    def __init__(self, has_failed: Callable[[int], bool]) -> None:
        self._has_failed = has_failed
        self._held: dict[int, list[str]] = {}
        self._given_up: set[int] = set()
        self._shown: list[str] = []

    def hold(self, rank: int, line: str) -> list[str]:
        """Take one line of a rank's output. Returns the lines to print now."""
        if rank in self._given_up:
            return [line]
        held = self._held.get(rank)
        if held is None:
            if line not in FIRST_LINES or not self._has_failed(rank):
                return [line]
            held = self._held[rank] = []
        held.append(line)
        if len(held) <= MAX_HELD_LINES:
            return []
        self._given_up.add(rank)
        return self._held.pop(rank)

    def note_shown(self, traceback: str) -> None:
        """Note that the culprit's traceback has been printed."""
        self._shown.append(traceback.strip().removeprefix("…"))

    def release(self, *, explained: bool) -> list[tuple[int, str]]:
        """Return (rank, line) of what is still to be printed, and begin to watch the next attempt.

        Args:
            explained: the fault has been shown, so that lost connections add nothing to it.
        """
        held, self._held = self._held, {}
        shown, self._shown = self._shown, []
        self._given_up.clear()
        return [
            (rank, line)
            for rank, lines in sorted(held.items())
            if not _is_repetition("\n".join(lines), shown) and not (explained and reports_lost_peer(lines))
            for line in lines
        ]


def _is_repetition(text: str, shown: list[str]) -> bool:
    # a traceback in an error file may have lost its beginning, and output of exit handlers may follow it here
    return any(known and known in text for known in shown)
