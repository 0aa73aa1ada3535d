"""A reading of a slot is consistent, whatever its writer does meanwhile."""

from __future__ import annotations

import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.boards import seen

from grpo_run.runtime.board import slot_writer
from grpo_run.runtime.board._header import HEADER_BYTES
from grpo_run.runtime.board._slot_layout import SLOT_BYTES
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter


@pytest.fixture
def often_switching() -> Iterator[None]:
    """Make the interpreter switch threads as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def set_sequence(path: Path, number: int) -> None:
    """Write the sequence number of local rank 1's slot."""
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + SLOT_BYTES)
        file.write(struct.pack("<Q", number))


def test_a_write_under_way_is_not_read(board: Board, writer: SlotWriter, tmp_path: Path) -> None:
    """A reader that has no earlier reading does not know the rank's state."""
    for number, readable in ((7, False), (8, True)):
        set_sequence(tmp_path / "board.mmap", number)
        assert (board.read(1) is not None) is readable


def test_during_a_write_the_last_reading_is_returned_with_the_present_heartbeat(
    board: Board, writer: SlotWriter, tmp_path: Path
) -> None:
    """A writer that a garbage collection or a signal stops in the middle of a write is not unobserved."""
    writer.step = 3
    writer.publish()
    before = seen(board)
    set_sequence(tmp_path / "board.mmap", 7)
    writer.heartbeat()
    writer.record_work()
    during = seen(board)
    assert (during.step, during.writes) == (3, before.writes)
    assert during.heartbeat_seconds > before.heartbeat_seconds
    assert during.last_work_seconds > before.last_work_seconds
    board.begin_attempt(1)
    assert board.read(1) is None


def test_two_threads_that_write_at_once_leave_a_readable_slot(
    board: Board, writer: SlotWriter, often_switching: None
) -> None:
    """Whichever write ends last, the sequence number is even afterwards."""
    threads = [
        threading.Thread(target=lambda: [writer.publish() for _ in range(2000)] and None) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert board.read(1) is not None


def test_a_concurrent_reader_sees_consistent_slots_only(
    board: Board, writer: SlotWriter, often_switching: None
) -> None:
    """Fields that are always written equal are always read equal."""
    stop = threading.Event()

    def write() -> None:
        count = 0
        while not stop.is_set():
            count += 1
            writer.step = writer.voted_step = writer.committed_step = writer.votes = count
            writer.vote_wait_seconds = writer.checkpoint_seconds = float(count)
            writer.publish()

    thread = threading.Thread(target=write)
    thread.start()
    readings = []
    try:
        for _ in range(100_000):
            slot = board.read(1)
            if slot is None:
                time.sleep(0)  # the writer sleeps in the middle of a write: let it continue
            elif slot.step:
                readings.append(slot)
            if len(readings) == 500:
                break
    finally:
        stop.set()
        thread.join()
    assert len(readings) == 500
    torn = [
        slot
        for slot in readings
        if len(
            {
                slot.step,
                slot.voted_step,
                slot.committed_step,
                slot.votes,
                slot.vote_wait_seconds,
                slot.checkpoint_seconds,
            }
        )
        != 1
    ]
    assert torn == []


@pytest.mark.parametrize("part", ["OPEN_PHASES", "write_integers", "write_floats"])
def test_an_interrupted_write_does_not_make_the_slot_unreadable(
    board: Board, writer: SlotWriter, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A signal handler of the script may raise at any point.

    The next complete write makes the slot readable again.
    """
    with monkeypatch.context() as patched:

        def interrupted(*args: object) -> None:
            raise KeyboardInterrupt

        struct_like = type("Interrupted", (), {"pack": staticmethod(interrupted)})
        patched.setattr(slot_writer, part, interrupted if part.startswith("write") else struct_like)
        with pytest.raises(KeyboardInterrupt):
            writer.publish()
    writer.step = 8
    writer.publish()
    assert seen(board).step == 8
