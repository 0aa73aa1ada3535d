"""When the wait detector looks at threads, and when it reports."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.collective_entries import add_entry

from grpo_run.runtime.board import slot_writer
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.supervisor.detection import _wait_detector as wait_detector
from grpo_run.runtime.supervisor.detection._local_ranks import LocalRanks, SlotMovement
from grpo_run.runtime.supervisor.detection._wait_detector import WaitDetector
from grpo_run.runtime.supervisor.detection.detector import HangDetector
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog import processes
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.processes import MainThread
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence
from grpo_run.watchdog.stalls.overdue import PhaseClock
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.waits.looks import Process, RankLook, Wait, WaitingThread, WaitKind

FUTEX = Wait(kind=WaitKind.futex, call="futex")
TIMED = Wait(kind=WaitKind.timed, call="futex", timeout_seconds=math.nan)
CLOSED = (WaitKind.futex, WaitKind.child, WaitKind.sleep)


@dataclass
class Rank:
    """What /proc shows of a rank: its threads' waits, the main thread's first."""

    waits: list[Wait] = field(default_factory=lambda: [TIMED])
    switches: int = 0
    state: str = "S"
    idle: tuple[int, ...] = ()


class World:
    """Two ranks in training on a board; the clock starts at 1000 s."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.ranks = {0: Rank(), 1: Rank()}
        self.looks: list[tuple[float, tuple[int, ...]]] = []
        self.deadline = 60.0
        self.beating = {0, 1}
        self.forgotten_at = 0.0
        monkeypatch.setattr(slot_writer, "time", self)
        monkeypatch.setattr(wait_detector, "LookReader", lambda: self)
        monkeypatch.setattr(processes, "read_main_thread", self._main_thread)
        self.refused: dict[int, str] = {}
        self.board = Board.create(path, 2)
        self.writers = [self.board.writer(rank, rank=rank, pid=100 + rank, attempt=0) for rank in (0, 1)]
        for writer in self.writers:
            writer.state = RankState.training
            writer.enter(Phase.reward)
        local = LocalRanks(
            board=self.board, local_ranks={0: 0, 1: 1}, pids={0: 100, 1: 101}, sockets={}, world_size=2
        )
        self.movement = SlotMovement()
        self.detector = WaitDetector(local, self.movement, self._overdue_at, 300.0)

    def monotonic_ns(self) -> int:
        return round(self.now * 1e9)

    def advance(self, seconds: float) -> HangFinding | None:
        """Scan ten times per second; stop at the first finding."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += 0.1
            for rank in self.beating:
                self.writers[rank].heartbeat()
            slots = dict(enumerate(self.board.read_all()))
            self.movement.record(slots, self.now)
            found = self.detector.scan(slots, self.now)
            if found is not None:
                return found
        return None

    def stalls(self, seconds: float) -> Stall:
        """Scan for this long; return the ranks that are proved stuck."""
        found = self.advance(seconds)
        assert found is not None
        assert found.stall is not None
        return found.stall

    # what the reader shows

    def forget(self) -> None:
        self.forgotten_at = self.now

    def main_thread_may_be_stuck(self, pid: int) -> bool:
        return self.ranks[pid - 100].waits[0].kind in CLOSED

    def read(self, pids: Mapping[int, int], idle: Mapping[int, Collection[int]]) -> dict[int, RankLook]:
        self.looks.append((self.now, tuple(pids)))
        return {
            rank: RankLook(
                pid=pid,
                processes={
                    pid: Process(
                        pid=pid,
                        parent=1,
                        threads=tuple(
                            WaitingThread(
                                tid=pid + 1000 * number,
                                name="python",
                                state=self.ranks[rank].state,
                                switches=self.ranks[rank].switches,
                                wait=wait,
                            )
                            for number, wait in enumerate(self.ranks[rank].waits)
                        ),
                    )
                },
                idle_threads=frozenset(idle[rank]),
            )
            for rank, pid in pids.items()
        }

    def _main_thread(self, pid: int) -> MainThread:
        return MainThread(state=self.ranks[pid - 100].state, cpu_seconds=0.0)

    def _overdue_at(self, slot: Slot, when: float, now: float) -> PhaseClock | None:
        since = slot.phases[-1].since_seconds
        if when - since <= self.deadline:
            return None
        return PhaseClock(
            rank=slot.rank,
            phase=slot.phases[-1].phase,
            since_seconds=since,
            silent_seconds=when - since,
            deadline_seconds=self.deadline,
            occurrence=Occurrence.later,
            deadline_at_seconds=since + self.deadline,
        )


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """Two ranks; both wait with a time limit."""
    return World(tmp_path / "board.mmap", monkeypatch)


def test_a_stuck_rank_is_found_within_seconds(world: World) -> None:
    """Three looks; the phase decides the cause, and the time is that of the rank's last write."""
    world.ranks[1].waits = [FUTEX]
    found = world.advance(10.0)
    assert found is not None
    assert found.stall is not None
    assert found.stall.confidence == "proved"
    assert (found.stall.culprits, found.stall.waiters) == ((1,), (0,))
    assert found.stall.cause is Cause.reward_stall
    assert found.began_at_seconds == pytest.approx(1000.1)
    assert [ranks for _, ranks in world.looks] == [(1,)] * 3
    assert 5.9 <= world.now - 1000.0 <= 8.0
    assert world.forgotten_at == world.looks[-1][0]  # the look that proves it reads every thread


def test_looks_are_rare_while_nothing_is_due_before_a_known_time(world: World) -> None:
    """All threads sleep; a rank that gets stuck when its sleep ends is found as fast as any other."""
    sleep = Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=1050.0)
    for rank in world.ranks.values():
        rank.waits = [sleep]
    assert world.advance(49.9) is None
    assert len(world.looks) <= 9
    world.ranks[1].waits = [FUTEX]
    world.ranks[1].switches += 1
    assert world.advance(10.0) is not None


def test_no_thread_is_read_while_any_rank_moves(world: World) -> None:
    """A rank that writes its slot is at work, and the others may wait for it."""
    world.ranks[1].waits = [FUTEX]
    for _ in range(20):
        assert world.advance(2.0) is None
        world.writers[0].record_work()
    assert world.looks == []


def test_no_thread_is_read_while_any_main_thread_runs(world: World) -> None:
    """A rank that computes for minutes without a write."""
    world.ranks[1].waits = [FUTEX]
    world.ranks[0].state = "R"
    assert world.advance(60.0) is None
    assert world.looks == []


def test_no_thread_is_read_of_ranks_that_wait_with_a_time_limit(world: World) -> None:
    """Or in a collective."""
    assert world.advance(60.0) is None
    world.ranks[1].waits = [FUTEX]
    add_entry(world.writers[1].collective_log, operation="recv", progress=CollectiveProgress.waiting)
    assert world.advance(60.0) is None
    assert world.looks == []


def test_a_rank_whose_heartbeat_is_late_is_left_to_the_deadlines(world: World) -> None:
    """It may be frozen from outside; then its threads seem to wait as before."""
    world.ranks[1].waits = [FUTEX]
    world.beating = {0}
    assert world.advance(60.0) is None
    assert world.looks == []


def test_looks_become_rarer_while_they_prove_nothing(world: World) -> None:
    """A thread at work beside the main thread, which may wake it; once it is stuck too, that is found."""
    world.ranks[1].waits = [FUTEX, TIMED]
    assert world.advance(60.0) is None
    assert 8 <= len(world.looks) <= 16
    world.ranks[1].waits = [FUTEX, FUTEX]
    assert world.advance(12.0) is not None


def test_a_rank_that_runs_between_two_looks_is_not_stuck(world: World) -> None:
    """Its main thread waits for one thing after another."""
    world.ranks[1].waits = [FUTEX]
    for _ in range(60):
        world.ranks[1].switches += 1
        assert world.advance(1.0) is None


def test_a_sleep_is_reported_only_if_it_lasts_beyond_the_deadline(world: World) -> None:
    """Within seconds, with the deadline that it will miss."""
    sleep = Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=1050.0)
    world.ranks[1].waits = [sleep]
    assert world.advance(30.0) is None
    world.writers[1].record_work()
    world.ranks[1].waits = [Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=9000.0)]
    stall = world.stalls(10.0)
    assert (stall.deadline_seconds, stall.confidence) == (60.0, "proved")
    assert stall.lasts_seconds == pytest.approx(8000.0, abs=100.0)


def test_all_ranks_stuck_are_named_together(world: World) -> None:
    """Every rank takes the same lock twice."""
    for rank in world.ranks.values():
        rank.waits = [FUTEX]
    stall = world.stalls(10.0)
    assert stall.culprits == (0, 1)
    assert stall.waiters == ()


def test_a_suspicion_precedes_the_finding_and_is_withdrawn(world: World) -> None:
    """After two looks that agree."""
    world.ranks[1].waits = [FUTEX]
    while world.detector.suspicion is None:
        assert world.advance(0.1) is None
    world.writers[1].record_work()
    assert world.advance(0.1) is None
    assert world.detector.suspicion is None


def test_a_refusal_of_the_kernel_is_named(world: World) -> None:
    """What cannot be read is never a reason to act."""
    world.refused = {1: "may not be read"}
    assert world.detector.unavailable == {1: "no wait states of its threads: may not be read"}


def scan_until(watch: HangDetector, world: World, seconds: float) -> HangFinding | None:
    """Scan with the whole detector; stop at the first finding."""
    until = world.now + seconds
    while world.now < until:
        world.now += 0.1
        for writer in world.writers:
            writer.heartbeat()
        found = watch.scan(dict(enumerate(world.board.read_all())))
        if found is not None:
            return found
    return None


def whole_detector(world: World) -> HangDetector:
    """The detector of hangs with the default deadlines."""
    watch = HangDetector(
        world.board, DeadlineSettings(), observe_exit=lambda pids, connections: None, clock=lambda: world.now
    )
    watch.begin_attempt(world.board, {0: 0, 1: 1}, {0: 100, 1: 101}, {}, 2)
    return watch


@pytest.mark.parametrize(
    ("wait", "proved"),
    [
        (FUTEX, True),
        (Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=9_000.0), True),
        (Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=1_200.0), False),
    ],
)
def test_a_rank_that_is_stuck_after_its_last_line_did_not_exit(
    world: World, wait: Wait, proved: bool
) -> None:
    """A proof does not wait for the deadline of exit hangs, but for the ranks that still exit.

    A sleep is proof if it lasts longer than the longest of these deadlines.
    """
    watch = whole_detector(world)
    for writer in world.writers:
        writer.leave(Phase.reward)
        writer.state = RankState.done
        writer.publish()
    world.ranks[1].waits = [wait]
    assert scan_until(watch, world, 10.0) is None
    watch.rank_exited(0)
    found = scan_until(watch, world, 10.0)
    assert (found is not None) is proved
    if found is None:
        return
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.confidence) == ((1,), "proved")
    assert found.stall.sentence.startswith("Rank 1 did not exit after the script's last line and waits for")
