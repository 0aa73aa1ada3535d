"""`Accelerator.save_state` is published on the board, and not changed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.hooks._no_trainer import watch_state_saving
from grpo_run.watchdog.observation import RankState, Slot

Reading = Callable[[], Slot]


class Accelerator:
    """The part of accelerate's class that is wrapped."""

    def __init__(self, during: Callable[[], object]) -> None:
        self.during = during

    def save_state(self, output_dir: str | None = None, **kwargs: Any) -> str | None:
        """Save."""
        self.during()
        return output_dir


@pytest.fixture
def wrapped(session: Any, monkeypatch: pytest.MonkeyPatch) -> type[Accelerator]:
    """The class, wrapped for the length of the test."""
    monkeypatch.setattr(Accelerator, "save_state", Accelerator.save_state)
    module = SimpleNamespace(Accelerator=Accelerator)
    watch_state_saving(module, session, lambda: session.slot.state is RankState.training)
    watch_state_saving(module, session, lambda: session.slot.state is RankState.training)
    return Accelerator


def test_begin_and_end_are_published_once(wrapped: type[Accelerator], reading: Reading, events: Any) -> None:
    """The journal has the directory before the end is on the board."""
    seen: list[bool] = []
    assert wrapped(lambda: seen.append(reading().saves_state)).save_state("out/a") == "out/a"
    assert seen == [True]
    assert (reading().saves_state, reading().states_saved) == (False, 1)
    assert [event["path"] for event in events() if event["event"] == "state_saved"] == ["out/a"]


def test_a_save_that_fails_is_none(wrapped: type[Accelerator], reading: Reading, events: Any) -> None:
    """The exception is the script's."""
    with pytest.raises(ZeroDivisionError):
        wrapped(lambda: 1 / 0).save_state("out/a")
    assert (reading().saves_state, reading().states_saved) == (False, 0)
    assert events() == []


def test_a_save_inside_a_train_call_belongs_to_the_trainer(
    wrapped: type[Accelerator], reading: Reading, session: Any
) -> None:
    """The guard saves there."""
    session.slot.state = RankState.training
    wrapped(lambda: None).save_state("out/a")
    assert reading().states_saved == 0


def test_no_save_begins_while_the_ranks_are_about_to_be_ended(
    wrapped: type[Accelerator], board: Board, reading: Reading
) -> None:
    """It goes on if the announcement is taken back."""
    board.announce_end(True)
    thread = threading.Thread(target=lambda: wrapped(lambda: None).save_state("out/a"))
    thread.start()
    time.sleep(0.2)
    assert (reading().saves_state, reading().states_saved) == (False, 0)
    board.announce_end(False)
    thread.join(10.0)
    assert reading().states_saved == 1
