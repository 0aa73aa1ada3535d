"""When slots change, and which of them cannot be read."""

from __future__ import annotations

import time
from pathlib import Path

from support.collective_entries import add_entry

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.supervisor.detection._local_ranks import START_SECONDS, UNREADABLE_SECONDS, SlotMovement
from grpo_run.watchdog.observation import Phase


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
    movement, began = SlotMovement(), time.monotonic() + 100.0  # the rank dates nothing between two scans
    movement.record({0: board.read(0)}, began)
    movement.record({0: None}, began + 0.1)
    assert movement.unreadable == {}
    movement.record({0: None}, began + UNREADABLE_SECONDS)
    assert movement.unreadable == {0: "its slot on the board cannot be read"}
    writer.publish()
    movement.record({0: board.read(0)}, began + 10.0)
    assert movement.unreadable == {}
    assert movement.moved_at(0) == began + 10.0


def test_after_a_pause_of_the_supervisor_a_slot_is_read_again_before_it_is_reported(tmp_path: Path) -> None:
    """The time in which nobody read does not count."""
    board = Board.create(tmp_path / "board.mmap", 1)
    board.writer(0, rank=0, pid=4711, attempt=0).publish()
    movement = SlotMovement()
    movement.record({0: board.read(0)}, 100.0)
    movement.restart(200.0)
    movement.record({0: None}, 200.0)
    assert movement.unreadable == {}


def test_a_change_is_dated_by_what_the_rank_has_written_since_the_last_scan(tmp_path: Path) -> None:
    """Scans are rare: without this, a rank would seem to stand still later than it does."""
    board = Board.create(tmp_path / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=4711, attempt=0)
    movement, began = SlotMovement(), time.monotonic()
    movement.record({0: board.read(0)}, began)
    for write in (
        lambda: writer.enter(Phase.reward),
        writer.record_work,
        lambda: add_entry(writer.collective_log, sequence=1),
    ):
        write()
        written, scanned = time.monotonic(), time.monotonic() + 0.2
        movement.record({0: board.read(0)}, scanned)
        moved_at = movement.moved_at(0)
        assert moved_at is not None
        assert began <= moved_at <= written
        assert movement.still_seconds(0, scanned) >= 0.2
        began = moved_at
        movement.record({0: board.read(0)}, began)


def test_a_date_that_lies_outside_the_two_scans_is_not_believed(tmp_path: Path) -> None:
    """Ranks of another version date nothing, and a writer may be interrupted between the clock and the
    write.
    """
    board = Board.create(tmp_path / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=4711, attempt=0)
    movement = SlotMovement()
    for scanned in (time.monotonic() + 10, time.monotonic() + 20, 1.0, 2.0):
        writer.record_work()
        movement.record({0: board.read(0)}, scanned)
        assert movement.moved_at(0) == scanned
