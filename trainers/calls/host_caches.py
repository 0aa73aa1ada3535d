"""Release this rank's host memory caches, once each time that host memory runs short.

The supervisor announces it on the board. Each rank acts after its next step, by itself: nothing collective happens, and no
phase is entered, because another rank may see the announcement a step later. Called by `steps.py`.
"""

from __future__ import annotations

import ctypes
import gc

from grpo_run.runtime.board.board import Board


class HostCaches:
    """What one rank has freed.

    Args:
        board: carries the announcement.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._freed = False

    def after_step(self) -> None:
        """Free caches if memory has become short since they were freed last."""
        short = self._board.memory_is_short
        if short and not self._freed:
            free_caches()
        self._freed = short


def free_caches() -> None:
    """Collect garbage, and give memory that the C library keeps back to the kernel (malloc_trim(3), glibc only)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
