"""The log of a rank's collectives as its readers see it, and a handle that is no collective's."""

from __future__ import annotations

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.deadlocks.collectives import Collective


def entries(board: Board) -> tuple[Collective, ...]:
    """Return the log as a reader sees it."""
    return board.collective_log(0)


class Handle:
    """A fake `Work` that supports weak references."""
