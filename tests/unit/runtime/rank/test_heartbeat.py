"""The heartbeat of a rank's interpreter."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.heartbeat import start_heartbeat


def test_the_heartbeat_repeats_in_a_daemon_thread() -> None:
    """The thread does not keep the process alive."""
    beats = threading.Semaphore(0)
    slot = SimpleNamespace(heartbeat=beats.release, publish_threads=lambda heartbeat, idle: None)
    thread = start_heartbeat(slot, 0.001)  # type: ignore[arg-type]
    assert thread.daemon
    assert all(beats.acquire(timeout=10) for _ in range(3))


def test_the_heartbeat_publishes_its_own_thread(tmp_path: Path) -> None:
    """The kernel's id of the thread, which the watchdog finds in /proc."""
    board = Board.create(tmp_path / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=1, attempt=0)
    thread = start_heartbeat(writer, 0.001)
    deadline = time.monotonic() + 10
    while (slot := board.read(0)) is None or not slot.heartbeat_thread:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert slot.heartbeat_thread == thread.native_id
    writer.detach()  # the thread runs on; its board goes
