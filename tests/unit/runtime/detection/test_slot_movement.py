"""When slots change, and which of them cannot be read."""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.detection.slot_movement import START_SECONDS, UNREADABLE_SECONDS, SlotMovement


def test_a_rank_that_starts_is_not_reported_as_unreadable() -> None:
    """It writes its slot only once its interpreter runs."""
    movement = SlotMovement()
    for seconds in (100.0, 100.1, 100.0 + START_SECONDS - 0.1):
        movement.record({0: None}, seconds)
        assert movement.unreadable == {}


def test_a_rank_that_never_writes_its_slot_is_reported() -> None:
    """A rank that cannot be observed is never taken for a healthy one."""
    movement = SlotMovement()
    movement.record({0: None}, 100.0)
    movement.record({0: None}, 100.0 + START_SECONDS)
    assert movement.unreadable == {0: "it has not written its slot on the board for 30 s"}


def test_a_slot_that_stays_unreadable_is_reported(tmp_path: Path) -> None:
    """The rank had written it, so something happened to the board; the next reading ends the report."""
    board = Board.create(tmp_path / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=4711, attempt=0)
    writer.publish()
    movement = SlotMovement()
    movement.record({0: board.read(0)}, 100.0)
    movement.record({0: None}, 100.1)
    assert movement.unreadable == {}
    movement.record({0: None}, 100.0 + UNREADABLE_SECONDS)
    assert movement.unreadable == {0: "its slot on the board cannot be read"}
    writer.publish()
    movement.record({0: board.read(0)}, 110.0)
    assert movement.unreadable == {}
    assert movement.moved_at(0) == 110.0


def test_after_a_pause_of_the_supervisor_a_slot_is_read_again_before_it_is_reported(tmp_path: Path) -> None:
    """The time in which nobody read does not count."""
    board = Board.create(tmp_path / "board.mmap", 1)
    board.writer(0, rank=0, pid=4711, attempt=0).publish()
    movement = SlotMovement()
    movement.record({0: board.read(0)}, 100.0)
    movement.restart(200.0)
    movement.record({0: None}, 200.0)
    assert movement.unreadable == {}
