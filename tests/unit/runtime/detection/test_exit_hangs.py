"""Exit hangs: which processes are reported after the last line of every script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.detection.exit_hangs import CHECK_SECONDS, ExitHangDetector
from grpo_run.watchdog import processes
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.processes import MainThread, SessionUsage
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.stall import Stall

SETTINGS = DeadlineSettings(exit_seconds=8.0, exit_connected_seconds=300.0)


class End:
    """Two ranks whose scripts have ended and whose processes sleep; time advances on request."""

    def __init__(self, slot: Slot, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.slots: dict[int, Slot | None] = {0: slot, 1: replace(slot, rank=1)}
        self.pids = {0: 900, 1: 901}
        self.state = "S"
        self.cpu_seconds = {900: 10.0, 901: 10.0}
        self.io_bytes: dict[int, int | None] = {900: 1000, 901: 1000}
        self.connected: set[int] = set()
        self.asked: list[int] = []
        self.looked = 0
        self.detector = ExitHangDetector(SETTINGS)
        monkeypatch.setattr(processes, "read_main_thread", self._main_thread)
        monkeypatch.setattr(processes, "read_session", self._session)
        monkeypatch.setattr(processes, "has_remote_connection", self._connected)

    def wait(self, seconds: float, *, busy: int | None = None) -> tuple[float, Stall] | None:
        """Scan ten times per second for this long; return the time and the stall of the first finding."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if busy is not None:
                self.cpu_seconds[busy] += 0.05
            found = self.detector.scan(self.slots, self.pids, self.now)
            if found is not None:
                return self.now, found
        return None

    def _main_thread(self, pid: int) -> MainThread | None:
        self.looked += 1
        return MainThread(state=self.state, cpu_seconds=1.0)

    def _session(self, pid: int) -> SessionUsage | None:
        return SessionUsage(members=(pid,), cpu_seconds=self.cpu_seconds[pid], io_bytes=self.io_bytes[pid])

    def _connected(self, pid: int) -> bool:
        self.asked.append(pid)
        return pid in self.connected


@pytest.fixture
def end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> End:
    """Two ranks without remote connections."""
    board = Board.create(tmp_path / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=900, attempt=0)
    writer.state = RankState.done
    writer.publish()
    slot = board.read(0)
    assert slot is not None
    return End(slot, monkeypatch)


def test_inactive_processes_are_found_after_the_deadline(end: End) -> None:
    """Not before. The sentence names the ranks and the time, and says that training was complete."""
    assert end.wait(8.0) is None
    found = end.wait(1.0)
    assert found is not None
    stall = found[1]
    assert (stall.cause, stall.culprits, stall.waiters) == (Cause.no_progress, (0, 1), ())
    assert (stall.phase, stall.deadline_seconds) == (Phase.idle, 8.0)
    assert 8.0 <= stall.waited_seconds <= 8.0 + 2 * CHECK_SECONDS
    assert stall.sentence == (
        f"Ranks 0 and 1 did not exit after the script's last line and did nothing for {stall.waited_seconds:.1f} s"
        " (deadline 8.0 s); training was complete."
    )


def test_only_remaining_processes_are_named(end: End) -> None:
    """The other rank has exited."""
    del end.pids[0]
    found = end.wait(10.0)
    assert found is not None
    assert found[1].culprits == (1,)
    assert found[1].sentence.startswith("Rank 1 did not exit")


def test_processes_are_checked_twice_per_second(end: End) -> None:
    """The detector scans more often."""
    end.wait(2.0)
    assert end.looked == 2 * 4


@pytest.mark.parametrize("what", ["cpu", "io", "unreadable bytes", "zombie", "not done", "no slot"])
def test_a_process_that_works_or_is_unknown_is_no_hang(end: End, what: str) -> None:
    """The test uses a single rank."""
    del end.pids[0]
    done = end.slots[1]
    assert done is not None
    if what == "unreadable bytes":
        end.io_bytes[901] = None
    elif what == "zombie":
        end.state = "Z"
    elif what == "not done":
        end.slots[1] = replace(done, state=RankState.training)
    elif what == "no slot":
        end.slots[1] = None
    for _ in range(20):
        if what == "io":
            end.io_bytes[901] = (end.io_bytes[901] or 0) + 64 * 1024
        assert end.wait(5.0, busy=901 if what == "cpu" else None) is None


def test_inactivity_is_counted_from_the_last_activity(end: End) -> None:
    """Sums that decrease because a child has exited are activity too."""
    del end.pids[0]
    assert end.wait(6.0) is None
    end.cpu_seconds[901] -= 5.0
    assert end.wait(7.5) is None
    assert end.wait(2.0) is not None


def test_a_connected_process_gets_the_long_deadline(end: End) -> None:
    """An upload may wait for its answer, and /proc does not count bytes on sockets.

    The deadline is still finite.
    """
    end.connected = {901}
    began = end.now
    assert end.wait(299.0) is None
    found = end.wait(5.0)
    assert found is not None
    assert found[0] - began >= 300.0
    assert found[1].waited_seconds >= 300.0


def test_the_end_of_a_connection_ends_the_long_deadline(end: End) -> None:
    """A process that was inactive all the time is reported at once."""
    end.connected = {901}
    assert end.wait(60.0) is None
    end.connected = set()
    assert end.wait(1.0) is not None


def test_connections_are_read_only_for_inactive_processes_after_the_deadline(end: End) -> None:
    """Reading them is expensive; a process that has exited has none."""
    assert end.wait(7.5) is None
    assert end.asked == []
    end.connected = {900, 901}
    assert end.wait(2.0) is None
    assert set(end.asked) == {900}


def test_a_pause_of_the_supervisor_is_not_inactivity(end: End) -> None:
    """Nothing is known about the time between two distant scans."""
    assert end.wait(6.0) is None
    end.detector.restart()
    assert end.wait(7.5) is None
    assert end.wait(2.0) is not None
