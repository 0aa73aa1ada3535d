"""Exit hangs: which processes are reported after the last line of every script, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.supervisor.detection.exit_hangs import (
    CHECK_SECONDS,
    CONNECTIONS_SECONDS,
    ExitHangDetector,
)
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import QUIET_BYTES, ExitFacts, ProcessUsage
from grpo_run.watchdog.stalls.stall import Stall

SETTINGS = DeadlineSettings(exit_seconds=60.0, exit_connected_seconds=300.0, ceiling_seconds=3600.0)


class End:
    """Two ranks whose scripts have ended and whose processes sleep; time advances on request."""

    def __init__(self, slot: Slot) -> None:
        self.now = 1000.0
        self.slots: dict[int, Slot | None] = {0: slot, 1: replace(slot, rank=1)}
        self.pids = {0: 900, 1: 901}
        self.state = "S"
        self.cpu = {900: 10.0, 901: 10.0}
        self.io: dict[int, int | None] = {900: 1000, 901: 1000}
        self.waits_for: tuple[str, ...] = ()
        self.cost = 0.0
        self.spent = 0.0
        self.looks: list[tuple[float, bool]] = []
        self.detector = ExitHangDetector(SETTINGS, self._observe, cost_clock=lambda: self.spent)

    def wait(self, seconds: float, *, busy: int | None = None, writing: int | None = None) -> Stall | None:
        """Scan ten times per second for this long; return the first finding."""
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            if busy is not None:
                self.cpu[busy] += 0.05
            if writing is not None:
                self.io[writing] = (self.io[writing] or 0) + QUIET_BYTES
            found = self.detector.scan(self.slots, self.pids, self.now)
            if found is not None:
                return found
        return None

    def stalls(self, seconds: float, *, busy: int | None = None) -> Stall:
        """Scan for this long; return the processes that do not exit."""
        found = self.wait(seconds, busy=busy)
        assert found is not None
        return found

    def _observe(self, pids: Mapping[int, int], *, connections: bool) -> ExitFacts | None:
        self.looks.append((self.now, connections))
        self.spent += self.cost
        usages = {}
        for pid in pids.values():
            transferred = self.io[pid]
            if transferred is None:
                return None
            usages[pid, 1] = ProcessUsage(cpu_seconds=self.cpu[pid], io_bytes=transferred)
        return ExitFacts(states=dict.fromkeys(pids, self.state), own=usages, waits_for=self.waits_for)


@pytest.fixture
def end(tmp_path: Path) -> End:
    """Two ranks that nothing keeps alive."""
    board = Board.create(tmp_path / "board.mmap", 1)
    writer = board.writer(0, rank=0, pid=900, attempt=0)
    writer.state = RankState.done
    writer.publish()
    slot = board.read(0)
    assert slot is not None
    return End(replace(slot, heartbeat_seconds=0.0))


def test_inactive_processes_are_found_after_the_deadline(end: End) -> None:
    """Not before. The sentence names the ranks and the time, and says that training was complete."""
    assert end.wait(60.0) is None
    stall = end.stalls(2 * CHECK_SECONDS)
    assert (stall.cause, stall.culprits, stall.waiters) == (Cause.no_progress, (0, 1), ())
    assert (stall.phase, stall.deadline_seconds) == (Phase.idle, 60.0)
    assert stall.sentence == (
        "Ranks 0 and 1 did not exit after the script's last line and did nothing for"
        f" {stall.waited_seconds:.1f} s (deadline 60.0 s); training was complete."
    )


def test_only_remaining_processes_are_named(end: End) -> None:
    """The other rank has exited."""
    del end.pids[0]
    stall = end.stalls(70.0)
    assert stall.culprits == (1,)
    assert stall.sentence.startswith("Rank 1 did not exit")


def test_a_rank_that_works_protects_the_others(end: End) -> None:
    """Ending the run would end its work too, and no one waits for the ranks that hang."""
    assert end.wait(600.0, writing=900) is None
    assert end.wait(70.0) is not None


@pytest.mark.parametrize("what", ["cpu", "io", "unreadable bytes", "zombie", "not done", "no slot"])
def test_a_process_that_works_or_is_unknown_is_no_hang(end: End, what: str) -> None:
    """The test uses a single rank."""
    del end.pids[0]
    done = end.slots[1]
    assert done is not None
    if what == "unreadable bytes":
        end.io[901] = None
    elif what == "zombie":
        end.state = "Z"
    elif what == "not done":
        end.slots[1] = replace(done, state=RankState.training)
    elif what == "no slot":
        end.slots[1] = None
    assert end.wait(400.0, busy=901 if what == "cpu" else None, writing=901 if what == "io" else None) is None


def test_a_stopped_rank_is_found_early(end: End) -> None:
    """Its heartbeat is as old as its stop; the other rank has exited."""
    del end.pids[0]
    end.state = "T"
    assert end.wait(20.0) is None
    stall = end.stalls(3 * CHECK_SECONDS)
    assert (stall.cause, stall.culprits) == (Cause.interpreter_stuck, (1,))
    assert "ran no Python code for 2" in stall.sentence


def test_inactivity_is_counted_from_the_last_activity(end: End) -> None:
    """The process has written something in between."""
    assert end.wait(50.0) is None
    assert end.wait(2.0, writing=901) is None
    assert end.wait(58.0) is None
    assert end.wait(6.0) is not None


def test_while_something_lives_that_it_may_wait_for_the_deadline_is_longer(end: End) -> None:
    """The deadline is still finite, and the sentence names what it may wait for."""
    end.waits_for = ("process 40 (wandb)",)
    assert end.wait(300.0) is None
    stall = end.stalls(10.0)
    assert stall.waited_seconds >= 300.0
    assert "while process 40 (wandb) was there to wait for (deadline 300.0 s)" in stall.sentence


def test_a_busy_loop_is_ended_at_the_ceiling(end: End) -> None:
    """It uses the CPU and does nothing else; until then it may be a computation."""
    assert end.wait(3590.0, busy=901) is None
    stall = end.stalls(20.0, busy=901)
    assert stall.deadline_seconds == 3600.0
    assert "used the CPU without any input or output" in stall.sentence


def test_the_end_of_what_it_waited_for_ends_the_long_deadline(end: End) -> None:
    """Processes that were inactive all the time are reported at the next observation."""
    end.waits_for = ("another machine",)
    assert end.wait(120.0) is None
    end.waits_for = ()
    assert end.wait(2 * CHECK_SECONDS) is not None


def test_connections_are_looked_for_rarely_and_before_the_deadline(end: End) -> None:
    """It costs tens of milliseconds; a verdict needs them to be current."""
    end.wait(70.0)
    looked = [when for when, connections in end.looks if connections]
    assert len(looked) <= 70 / CONNECTIONS_SECONDS + 3
    assert end.looks[-1][1]


def test_an_expensive_observation_is_made_less_often(end: End) -> None:
    """Half a percent of a core at most, on a machine with many processes."""
    end.cost = 0.1
    end.wait(200.0)
    assert len(end.looks) <= 200 / (0.1 / 0.005) + 1


def test_a_pause_of_the_supervisor_is_not_inactivity(end: End) -> None:
    """Nothing is known about the time between two distant scans."""
    assert end.wait(50.0) is None
    end.detector.restart()
    assert end.wait(58.0) is None
    assert end.wait(10.0) is not None
