"""SIGTERM is sent when no rank saves, and the wait after it is bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.supervisor.stop import AFTER_SAVE_SECONDS, SignalledStop
from grpo_run.watchdog.observation import Slot

MakeSlot = Callable[..., Slot]


class Stopped:
    """A stop, and what became of the ranks."""

    def __init__(self, folder: Path, make_slot: MakeSlot) -> None:
        self.board = Board.create(folder / "board.mmap", 1)
        self.board.request_stop()
        self.signals = 0
        self.ranks: Any = SimpleNamespace(alive={0: 1}, request_exit=self._request_exit)
        self.stop = SignalledStop(30.0)
        self._make_slot = make_slot

    def _request_exit(self) -> None:
        self.signals += 1

    def poll(self, now: float, calls: int, *, saved: bool = False) -> int:
        """Poll once; return how often the ranks were signaled."""
        slots: dict[int, Slot | None] = {0: self._make_slot(0, save_state_calls=calls)}
        self.stop.after_a_save(self.ranks, self.board, slots, now=now, saved=saved)
        return self.signals


@pytest.fixture
def stopped(tmp_path: Path, make_slot: MakeSlot) -> Stopped:
    """A stop is requested."""
    return Stopped(tmp_path, make_slot)


def test_ranks_are_signaled_a_moment_after_the_next_save(stopped: Stopped) -> None:
    """Meanwhile no further save begins."""
    assert stopped.poll(1.0, 2) == 0
    assert stopped.poll(2.0, 3) == 0
    assert stopped.poll(3.0, 4, saved=True) == 0
    assert stopped.board.ends_ranks
    assert stopped.poll(3.0 + AFTER_SAVE_SECONDS / 2, 4) == 0
    assert stopped.poll(3.0 + AFTER_SAVE_SECONDS, 4) == 1
    assert stopped.stop.sent
    assert stopped.board.requests[0], "the stop is still requested"


def test_a_save_that_has_begun_meanwhile_is_completed_by_all_ranks(stopped: Stopped) -> None:
    """Ranks that are held would never enter it."""
    stopped.poll(3.0, 4, saved=True)
    assert stopped.poll(3.0 + AFTER_SAVE_SECONDS, 5) == 0
    assert not stopped.board.ends_ranks
    assert stopped.poll(20.0, 5) == 0
    stopped.poll(21.0, 6, saved=True)
    assert stopped.poll(21.0 + AFTER_SAVE_SECONDS, 6) == 1


def test_the_wait_for_handlers_ends(stopped: Stopped) -> None:
    """With the last rank, at the deadline, or when the user asks again."""
    stopped.stop.send(stopped.ranks, 100.0)
    assert not stopped.stop.is_over(stopped.ranks, 129.0)
    assert stopped.stop.is_over(stopped.ranks, 130.0)
    stopped.stop.send(stopped.ranks, 200.0)
    stopped.stop.expire()
    assert stopped.stop.is_over(stopped.ranks, 201.0)
    stopped.stop.send(stopped.ranks, 300.0)
    stopped.ranks.alive.clear()
    assert stopped.stop.is_over(stopped.ranks, 301.0)
