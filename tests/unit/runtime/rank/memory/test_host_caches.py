"""Caches are freed once each time that memory becomes short."""

from __future__ import annotations

import gc
import weakref

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.memory import cleanup
from grpo_run.runtime.rank.memory.cleanup import HostCaches, free_caches


def test_caches_are_freed_once_for_each_announcement(board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in every step, and again when memory has become short again."""
    freed: list[int] = []
    monkeypatch.setattr(cleanup, "free_caches", lambda: freed.append(1))
    caches = HostCaches(board)
    for short in (False, True, True, True, False, True):
        board.announce_short_memory(short)
        caches.after_step()
    assert len(freed) == 2


def test_the_announcement_does_not_stop_ranks(board: Board) -> None:
    """Nor does its end take back a stop."""
    board.announce_short_memory(True)
    assert board.requests == (False, 0)
    board.request_stop()
    board.announce_short_memory(False)
    assert board.requests == (True, 0)


class Node:
    """An object in a cycle."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_collected() -> None:
    """Also where automatic collection is off."""
    gc.disable()
    try:
        gone = weakref.ref(Node())
        free_caches()
        assert gone() is None
    finally:
        gc.enable()
