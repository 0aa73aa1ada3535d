"""Hang detection on a real board: late ranks are left alone, and what cannot be observed proves nothing."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.collective_entries import add_entry

from grpo_run.runtime.board import collective_log, slot_writer
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.detection import flight_recorder
from grpo_run.runtime.detection.collective_records import MAX_UNANSWERED, SILENT_SECONDS
from grpo_run.runtime.detection.detector import SUPERVISOR_PAUSE_SECONDS, HangDetector
from grpo_run.runtime.detection.families import connections
from grpo_run.runtime.detection.families import usage as families
from grpo_run.runtime.detection.families.connections import Connections
from grpo_run.runtime.detection.families.usage import FamilyUsage, Thread
from grpo_run.runtime.detection.finding import Finding
from grpo_run.runtime.detection.flight_recorder import NoAnswer
from grpo_run.runtime.detection.slot_movement import UNREADABLE_SECONDS
from grpo_run.runtime.detection.waits.processes import LookReader
from grpo_run.watchdog import processes
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.deadlocks.threads import THREADS_HANDLER, ThreadReport
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.processes import MainThread
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts, ProcessUsage
from grpo_run.watchdog.stalls.stall import Stall

TIGHT = DeadlineSettings(
    floor_seconds=4, first_floor_seconds=20, first_seconds=20, startup_seconds=20, evaluation_seconds=20,
    ceiling_seconds=40, exit_seconds=4,
)  # fmt: skip
BACKENDS = {"all_reduce": "gloo:all_reduce", "all_gather": "gloo:all_gather", "barrier": "gloo:barrier"}


class World:
    """Ranks of one node on a real board, with their Flight Recorders and processes.

    Time advances on request.
    """

    def __init__(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int = 2, *, world_size: int | None = None,
        settings: DeadlineSettings = TIGHT,
    ) -> None:  # fmt: skip
        self.now = 1000.0
        clock = SimpleNamespace(monotonic_ns=lambda: round(self.now * 1e9))
        for module in (slot_writer, collective_log):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(flight_recorder, "fetch", self._fetch)
        monkeypatch.setattr(processes, "read_main_thread", self._main_thread)
        monkeypatch.setattr(processes, "members_by_session", lambda pids: {pid: [pid] for pid in pids})
        monkeypatch.setattr(LookReader, "main_thread_may_be_stuck", lambda self, pid: False)
        monkeypatch.setattr(families, "find_families", lambda pids: {pid: [pid] for pid in pids})
        monkeypatch.setattr(families, "read_family", self._family)
        monkeypatch.setattr(families, "read_threads", self._family_threads)
        monkeypatch.setattr(connections, "read_connections", self._connections)
        self.path = path
        self.board = Board.create(path, ranks)
        self.watch = HangDetector(self.board, settings, observe_exit=self.remaining, clock=lambda: self.now)
        self.some_thread_runs = (
            settings is TIGHT
        )  # with tight settings, only learned deadlines are of interest
        self.world_size = world_size or ranks
        self.frozen: set[int] = set()
        self.connected: set[int] = set()
        self.unreadable: set[int] = set()
        self.begin(0)

    def begin(self, attempt: int) -> None:
        """Start all ranks again, in the `data` phase of their first `train()` call."""
        self.board.begin_attempt(attempt)
        ranks = range(self.board.slots)
        self.polls: list[float] = []
        self.asked: list[set[int]] = []
        self.active: dict[int, list[str]] = {}
        self.switches: Counter[int] = Counter()
        self.entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
        self.groups: dict[str, dict[str, str]] = {}
        self.silent: dict[int, str] = {}
        self.cpu = dict.fromkeys(ranks, 10.0)
        self.io: dict[int, int | None] = dict.fromkeys(ranks, 1000)
        self.process_state = dict.fromkeys(ranks, "S")
        self.sequences: Counter[tuple[int, str]] = Counter()
        self.writers = [self.board.writer(r, rank=r, pid=100 + r, attempt=attempt) for r in ranks]
        for writer in self.writers:
            writer.state, writer.train_call, writer.step = RankState.training, 1, 7
            writer.replace(Phase.data)
            writer.publish()
        pids = {rank: 100 + rank for rank in ranks}
        sockets = {rank: f"/run/rank{rank}.sock" for rank in ranks}
        self.watch.begin_attempt(self.board, {rank: rank for rank in ranks}, pids, sockets, self.world_size)

    def issue(
        self, rank: int, operation: str, *, progress: CollectiveProgress = CollectiveProgress.waiting, elements: int = 3,
        line: int = 88, group: str = "0", noted: bool = True,
    ) -> int:  # fmt: skip
        """Let a rank issue a collective; return its log entry's number, 0 for one that C++ issued."""
        self.sequences[rank, group] += 1
        sequence = self.sequences[rank, group]
        self.entries[rank].append(
            {
                "process_group": [group, "default_pg"], "pg_id": 0, "collective_seq_id": sequence,
                "profiling_name": BACKENDS[operation], "input_sizes": [[elements]], "input_dtypes": ["Float"],
                "state": "scheduled", "retired": progress is CollectiveProgress.completed, "thread_id": "1",
            }
        )  # fmt: skip
        if not noted:
            return 0
        return add_entry(
            self.writers[rank].collective_log, group=group, sequence=sequence, operation=operation, sizes=str(elements), dtypes="Float",
            file="/home/user/train.py", line=line, function="main", step=8, progress=progress,
        )  # fmt: skip

    def complete(self, rank: int, note: int) -> None:
        """Complete the rank's last collective."""
        self.entries[rank][-1]["retired"] = True
        self.writers[rank].collective_log.mark(note, CollectiveProgress.completed)

    def slots(self) -> dict[int, Slot | None]:
        """Return the slots as the supervisor reads them."""
        whole = self.board.has_full_size
        return {
            rank: self.board.read(rank) if whole and rank not in self.unreadable else None
            for rank in range(self.board.slots)
        }

    def scan(self) -> Finding | None:
        """Scan once; every running interpreter has just stamped its heartbeat."""
        if self.board.has_full_size:
            for rank, writer in enumerate(self.writers):
                if rank not in self.frozen:
                    writer.heartbeat()
        return self.watch.scan(self.slots())

    def advance(
        self, seconds: float, *, every: float = 0.1, doing: Callable[[], None] = lambda: None
    ) -> Finding | None:
        """Scan for this long; stop at the first finding."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += every
            doing()
            found = self.scan()
            if found is not None:
                return found
        return None

    def begin_backward(self, rank: int, group: str = "0") -> None:
        """Let a rank enter a DDP backward pass, of which the log has one entry."""
        self.writers[rank].replace(Phase.forward_backward)
        add_entry(
            self.writers[rank].collective_log, group=group, sequence=self.sequences[rank, group] + 1, operation="backward", sizes="", dtypes="",
            file="/home/user/train.py", line=70, function="main", step=8,
        )  # fmt: skip

    def _fetch(
        self, sockets: dict[int, str], seconds: float, handler: str = flight_recorder.FLIGHT_RECORDER_HANDLER
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        failures = {rank: self.silent[rank] for rank in sockets if rank in self.silent}
        if handler == THREADS_HANDLER:
            self.asked.append(set(sockets))
            failures |= {rank: "no answer" for rank in sockets if rank in self.frozen}
            return {rank: self._threads(rank) for rank in sockets if rank not in failures}, failures
        self.polls.append(self.now)
        answers = {
            rank: json.dumps({"entries": self.entries[rank], "pg_config": self.groups}).encode()
            for rank in sockets
            if rank not in failures
        }
        return answers, failures

    def remaining(self, pids: Mapping[int, int], *, connections: bool) -> ExitFacts | None:
        """What `RemainingProcesses.observe` returns."""
        usages = {}
        for rank, pid in pids.items():
            transferred = self.io[rank]
            if transferred is None:
                return None
            usages[pid, 0] = ProcessUsage(cpu_seconds=self.cpu[rank], io_bytes=transferred)
        return ExitFacts(
            states={rank: self.process_state[rank] for rank in pids},
            own=usages,
            awaited={},
            waits_for=("another machine",) if self.connected else (),
        )

    def _threads(self, rank: int) -> bytes:
        log = self.board.collective_log(rank)
        waiting = {entry.thread for entry in log if entry.progress is CollectiveProgress.waiting}
        slot = self.board.read(rank)
        return (
            ThreadReport(
                waiting=dict.fromkeys(waiting, self.switches[rank]),
                passive={},
                active=tuple(self.active.get(rank, ())),
                in_backward=7
                if slot is not None and slot.phase is Phase.forward_backward and not waiting
                else None,
                issued={},
                uses_futures=False,
            )
            .model_dump_json()
            .encode()
        )

    def _main_thread(self, pid: int) -> MainThread | None:
        rank = pid - 100
        return MainThread(state=self.process_state[rank], cpu_seconds=self.cpu[rank])

    def _family(self, members: list[int]) -> FamilyUsage | None:
        ranks = [pid - 100 for pid in members]
        told = [io_bytes for rank in ranks if (io_bytes := self.io[rank]) is not None]
        if len(told) < len(ranks):
            return None
        cpu_seconds = sum(self.cpu[rank] for rank in ranks)
        return FamilyUsage(members=frozenset(members), cpu_seconds=cpu_seconds, io_bytes=sum(told))

    def _family_threads(self, members: list[int]) -> dict[int, Thread]:
        threads = {
            pid: Thread("python", self.process_state[pid - 100], self.cpu[pid - 100]) for pid in members
        }
        if self.some_thread_runs:
            threads |= {pid + 100: Thread("worker", "R", 0.0) for pid in members}
        return threads

    def _connections(
        self, members: dict[int, list[int]], supervisor: list[int]
    ) -> dict[int, Connections | None]:
        return {rank: Connections(outside=rank in self.connected, traffic_bytes=0) for rank in members}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., World]:
    """Create a world."""
    return lambda *args, **options: World(tmp_path / "board.mmap", monkeypatch, *args, **options)


@pytest.fixture
def world(make: Callable[..., World]) -> World:
    """Two ranks in training."""
    return make()


def mismatch(world: World) -> None:
    """Both ranks have reduced once; then one reduces and the other gathers."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce", line=88)
    world.issue(1, "all_gather", line=91)


# proof


def test_a_mismatch_is_found_within_a_second(world: World) -> None:
    """The finding has both ranks' lines and the time at which the second rank was blocked."""
    mismatch(world)
    found = world.advance(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.stall is None
    assert found.deadlock.cause is Cause.collective_mismatch
    assert {rank: place.line for rank, place in found.deadlock.locations.items()} == {0: 88, 1: 91}
    assert 1000.0 <= found.began_at_seconds <= 1000.1 + 1e-6
    assert set(world.watch.recordings) == {0, 1}


def test_rare_scans_prove_a_mismatch_as_soon_as_frequent_ones(world: World) -> None:
    """The detector asks for the scans that it needs: 0.3 s after the last change, and 0.1 s later."""
    world.scan()
    mismatch(world)
    found, scans = None, 0
    while found is None and scans < 10:
        world.now = min(world.now + 0.2, max(world.now, world.watch.due_at))
        found, scans = world.scan(), scans + 1
    assert found is not None
    assert world.now == pytest.approx(1000.4)
    assert scans == 3


def test_ranks_that_move_or_wait_for_no_other_rank_need_no_further_scan(world: World) -> None:
    """Otherwise a healthy run would be scanned more often than a deadlock needs."""
    assert world.advance(1.0, doing=world.writers[0].record_work) is None
    assert world.watch.due_at == math.inf
    world.issue(0, "all_reduce")
    world.scan()
    assert world.watch.due_at == pytest.approx(world.now + 0.3)
    world.writers[0].record_work()
    world.writers[1].record_work()
    world.now += 0.2
    world.scan()
    assert world.watch.due_at >= world.now + 0.25


def test_a_deadlock_needs_two_polls(world: World) -> None:
    """The first poll only raises a suspicion."""
    mismatch(world)
    while not world.polls:
        world.now += 0.1
        assert world.scan() is None
    assert world.watch.suspicion is not None
    assert world.advance(1.0) is not None
    assert len(world.polls) == 2


def test_recorders_that_changed_between_two_polls_prove_nothing(world: World) -> None:
    """The Flight Recorders changed although no slot did."""
    mismatch(world)

    def another() -> None:
        for rank in (0, 1):
            world.entries[rank].insert(
                0, {**world.entries[rank][0], "collective_seq_id": 1, "process_group": ["2", ""], "pg_id": 2}
            )

    assert world.advance(5.0, doing=another) is None
    assert len(world.polls) > 2
    assert world.advance(6.0) is not None


def test_a_slot_that_changes_between_two_polls_restarts_them(world: World) -> None:
    """A rank that runs is not deadlocked, whatever its last log entry is."""
    mismatch(world)
    assert world.advance(30.0, doing=world.writers[1].record_work) is None
    assert world.polls == []
    assert world.watch.suspicion is None


def test_an_unconfirmed_suspicion_is_withdrawn(world: World) -> None:
    """The rank was only slow to enter its next phase."""
    mismatch(world)
    while not world.polls:
        world.advance(0.1)
    assert world.watch.suspicion is not None
    world.writers[0].enter(Phase.optimizer)
    world.writers[1].enter(Phase.optimizer)
    assert world.scan() is None
    assert world.watch.suspicion is None


def test_a_circular_wait_is_found(world: World) -> None:
    """Two ranks issue collectives of two groups in opposite order."""
    world.groups = {"1": {"ranks": "[0, 1]"}, "2": {"ranks": "[0, 1]"}}
    world.issue(0, "all_reduce", group="1")
    world.issue(1, "all_reduce", group="2")
    found = world.advance(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.deadlock.cause is Cause.collective_missing_rank


def circle(world: World) -> None:
    """Each rank waits in a group in which the other has not arrived."""
    world.groups = {"1": {"ranks": "[0, 1]"}, "2": {"ranks": "[0, 1]"}}
    world.issue(0, "all_reduce", group="1")
    world.issue(1, "all_reduce", group="2")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_thread_that_may_act_prevents_the_proof_of_a_circle(world: World, rank: int) -> None:
    """It may join the group that the other rank waits in. Once it has ended, the circle is proved."""
    circle(world)
    world.active[rank] = ["Thread-1 at serve.py:12 serve"]
    assert world.advance(3.0) is None
    assert world.asked
    assert world.watch.suspicion is None
    world.active.clear()
    assert world.advance(10.0) is not None


def test_threads_are_asked_for_only_if_the_records_prove_a_deadlock(world: World) -> None:
    """A late rank is no reason to interrupt any interpreter."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.advance(3.0) is None
    assert world.polls
    assert world.asked == []


def test_a_thread_that_ran_between_two_polls_prevents_a_proof(world: World) -> None:
    """It slept at both, and its context switches say that it has run."""
    circle(world)

    def run() -> None:
        world.switches[1] += 1

    assert world.advance(5.0, doing=run) is None
    assert len(world.asked) > 1
    assert world.advance(10.0) is not None


def test_an_interpreter_that_does_not_run_proves_no_circle_and_is_asked_three_times(world: World) -> None:
    """Each request occupies a thread of its worker server, which also serves the Flight Recorder."""
    circle(world)
    world.frozen = {1}
    patient = DeadlineSettings()
    world.watch = HangDetector(world.board, patient, observe_exit=world.remaining, clock=lambda: world.now)
    world.watch.begin_attempt(world.board, {0: 0, 1: 1}, {0: 100, 1: 101}, {0: "a", 1: "b"}, 2)
    assert world.advance(30.0) is None
    assert [asked for asked in world.asked if 1 in asked] == [{0, 1}] * MAX_UNANSWERED
    assert len(world.asked) > MAX_UNANSWERED


def test_a_rank_that_exited_is_named_as_the_missing_one(world: World) -> None:
    """Its process exited with code 0; its collective log outlives it."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    world.watch.rank_exited(1)
    found = world.advance(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert (found.deadlock.cause, found.deadlock.culprits) == (Cause.rank_exited_early, (1,))


def test_a_rank_past_its_last_line_may_still_join_collectives(world: World) -> None:
    """Its threads and exit handlers may do so until the process has exited."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    assert world.advance(3.5) is None
    assert world.polls
    world.watch.rank_exited(1)
    found = world.advance(6.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.deadlock.culprits == (1,)


def test_a_single_rank_of_a_node_is_never_proved_wrong(make: Callable[..., World]) -> None:
    """The ranks that it waits for run on other nodes and may only be late."""
    world = make(1, world_size=2)
    world.issue(0, "all_reduce")
    assert world.advance(300.0, every=0.5) is None
    assert world.polls


# lateness


@pytest.mark.parametrize("phase", [Phase.generate, Phase.reward, Phase.data, Phase.eval])
def test_a_late_rank_that_works_is_not_reported(world: World, phase: Phase) -> None:
    """It works while the other rank waits in a collective."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(phase)
    assert world.advance(1200.0, every=1.0, doing=world.writers[1].record_work) is None
    assert world.watch.suspicion is None


def test_a_late_idle_rank_is_not_reported_before_its_deadline(world: World) -> None:
    """Polls continue and prove nothing."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.advance(19.5) is None
    assert len(world.polls) > 2
    found = world.advance(2.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.waiters, found.stall.phase) == ((1,), (0,), Phase.reward)
    assert found.began_at_seconds == pytest.approx(1000.0)


def test_a_missed_deadline_is_confirmed_by_a_second_check(world: World) -> None:
    """A single check may see a rank between two phases."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        assert world.advance(0.1) is None
    assert world.advance(0.1) is not None


def test_recorders_are_fetched_only_when_a_phase_is_overdue(world: World) -> None:
    """The first check assumes that every rank works and fetches nothing; then all recorders are fetched."""
    for rank in (0, 1):
        world.writers[rank].replace(Phase.reward)
    assert world.advance(19.5) is None
    assert world.polls == []
    found = world.advance(2.0)
    assert found is not None
    assert len(world.polls) == 2
    assert min(world.polls) >= 1020.0


def test_poll_intervals_grow_during_a_long_phase(world: World) -> None:
    """300 scans in 30 s cause at most a dozen polls, at growing intervals."""
    add_entry(world.writers[0].collective_log, progress=CollectiveProgress.waiting)
    patient = DeadlineSettings()
    world.watch = HangDetector(world.board, patient, observe_exit=world.remaining, clock=lambda: world.now)
    world.watch.begin_attempt(world.board, {0: 0, 1: 1}, {0: 100, 1: 101}, {0: "a", 1: "b"}, 2)
    world.writers[1].replace(Phase.generate)
    assert world.advance(30.0) is None
    assert 4 <= len(world.polls) <= 12
    gaps = [after - before for before, after in itertools.pairwise(world.polls)]
    assert gaps == sorted(gaps)
    assert gaps[-1] <= 5.2


def test_no_rank_is_polled_while_none_is_in_a_collective(world: World) -> None:
    """The duration of the standstill does not matter."""
    for rank in (0, 1):
        note = world.issue(rank, "all_reduce")
        world.complete(rank, note)
        world.writers[rank].replace(Phase.generate)
    assert world.advance(15.0) is None
    assert world.polls == []


def test_no_rank_is_polled_while_all_but_one_move(make: Callable[..., World]) -> None:
    """A single rank that waits for running ranks is at most late."""
    world = make(3)
    world.issue(0, "all_reduce")

    def work() -> None:
        for writer in world.writers[1:]:
            writer.record_work()

    assert world.advance(30.0, doing=work) is None
    assert world.polls == []


def test_a_newly_blocked_rank_is_polled_at_once(make: Callable[..., World]) -> None:
    """Even if polls had become rare: it may complete a deadlock."""
    world = make(3, settings=DeadlineSettings())
    world.issue(0, "all_reduce")
    world.issue(1, "all_reduce")
    assert world.advance(20.0, doing=world.writers[2].record_work) is None
    rare = len(world.polls)
    world.issue(2, "all_gather", line=91)
    began = world.now
    found = world.advance(1.0)
    assert found is not None
    assert found.deadlock is not None
    assert world.now - began < 0.6
    assert len(world.polls) == rare + 2


def test_gradient_reductions_of_ddp_are_observed(world: World) -> None:
    """C++ issues them: no log entry says that the rank waits, only its phase says that it may."""
    for rank, operation in ((0, "all_reduce"), (1, "all_gather")):
        world.begin_backward(rank)
        world.issue(rank, operation, noted=False)
    found = world.advance(1.0)
    assert found is not None
    assert found.deadlock is not None


def test_ranks_that_wait_in_different_groups_during_their_forward_pass_are_found(world: World) -> None:
    """The body of a hand-written loop is such a phase; the main threads wait in Python, and in no backward pass."""
    for rank, group in ((0, "0"), (1, "1")):
        world.writers[rank].replace(Phase.forward_backward)
        for other in ("0", "1"):
            world.issue(rank, "all_reduce", progress=CollectiveProgress.completed, group=other)
        world.issue(rank, "all_reduce", group=group)
    found = world.advance(1.0)
    assert found is not None
    assert found.deadlock is not None


def test_the_records_of_ranks_that_compute_in_their_backward_are_not_read(world: World) -> None:
    """Most ranks are there most of the time, and eight records take a tenth of a second of CPU time."""
    for rank in (0, 1):
        world.begin_backward(rank)
        world.process_state[rank] = "R"
    assert world.advance(10.0) is None
    assert world.polls == []
    world.issue(0, "all_reduce", progress=CollectiveProgress.enqueued, noted=False)
    world.issue(1, "all_gather", progress=CollectiveProgress.enqueued, noted=False)
    world.process_state = {0: "S", 1: "S"}
    assert world.advance(1.0) is not None


def test_the_records_are_read_late_while_ranks_wait_for_one_that_is_at_work(
    make: Callable[..., World],
) -> None:
    """Every step of a training has such a wait."""
    world = make(3)
    for rank in (0, 1):
        world.issue(rank, "all_reduce")
    world.writers[2].replace(Phase.reward)
    assert world.advance(1.9) is None
    assert world.polls == []
    assert world.advance(0.3) is None
    assert world.polls != []


@pytest.mark.parametrize(("operation", "reads_at"), [("all_reduce", 2.0), ("all_gather", 0.3)])
def test_the_records_of_collectives_on_devices_are_read_late_if_the_logs_agree(
    make: Callable[..., World], operation: str, reads_at: float
) -> None:
    """Nobody waits for a collective on a device, so every rank may be in its last one at any time."""
    world = make(2)
    for rank, name in ((0, "all_reduce"), (1, operation)):
        world.writers[rank].replace(Phase.generate)
        add_entry(
            world.writers[rank].collective_log, sequence=5, operation=name, sizes="3", dtypes="Float",
            progress=CollectiveProgress.enqueued, on_device=True,
        )  # fmt: skip
    assert world.advance(3.0) is None
    assert world.polls[0] == pytest.approx(1000.0 + reads_at, abs=0.25)


@pytest.mark.parametrize("defect", ["other operation", "other group", "passed by", "two threads", "exited"])
def test_the_records_are_read_at_once_if_more_than_a_late_rank_is_seen(
    make: Callable[..., World], defect: str
) -> None:
    """Another rank is at work, so the logs decide whether the others may be deadlocked."""
    world = make(3)
    world.writers[2].replace(Phase.reward)
    world.issue(0, "all_reduce")
    world.issue(1, "all_gather" if defect == "other operation" else "all_reduce", group="1" if defect == "other group" else "0")  # fmt: skip
    if defect == "passed by":
        world.issue(2, "all_gather", progress=CollectiveProgress.enqueued)
    if defect == "two threads":
        world.issue(1, "all_reduce", group="1")
    if defect == "exited":
        world.watch.rank_exited(2)
    world.advance(0.55)
    assert world.polls != []


@pytest.mark.parametrize("state", ["R", "D", "T"])
def test_a_runnable_thread_is_not_idle_in_its_backward(world: World, state: str) -> None:
    """It uses no CPU time because other processes occupy the processor or a disk is slow.

    One poll asleep is not enough. A rank that is seen running is not polled.
    """
    scans = itertools.count()
    world.groups = {"1": {"ranks": "[0, 1]"}, "2": {"ranks": "[0, 1]"}}
    for rank, group in ((0, "1"), (1, "2")):
        world.begin_backward(rank, group)
        world.issue(rank, "all_reduce", progress=CollectiveProgress.enqueued, noted=False, group=group)

    def flicker() -> None:
        turn = next(scans) if state == "R" else len(world.polls)
        for rank in (0, 1):
            world.process_state[rank] = state if turn % 2 else "S"

    assert world.advance(8.0, doing=flicker) is None
    assert len(world.polls) > 2
    world.process_state = {0: "S", 1: "S"}  # polls have grown rare, and two of them have to see it
    found = world.advance(11.0)
    assert found is not None
    assert found.deadlock is not None


def test_a_rank_that_moves_now_and_then_does_not_make_polls_frequent(make: Callable[..., World]) -> None:
    """The ranks that wait for it keep their poll interval."""
    world = make(2, settings=DeadlineSettings())
    world.issue(0, "all_reduce")
    looks = itertools.count()

    def sometimes() -> None:
        if next(looks) % 6 == 0:
            world.writers[1].record_work()

    assert world.advance(30.0, doing=sometimes) is None
    assert world.polls
    assert len(world.polls) <= 16


@pytest.mark.parametrize("phase", [Phase.vote, Phase.score, Phase.generate])
def test_a_wait_in_an_older_entry_is_seen(world: World, phase: Phase) -> None:
    """The rank issued another collective asynchronously before it waited for this one.

    No other rank waits.
    """
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.issue(0, "all_gather", progress=CollectiveProgress.enqueued)
    world.issue(1, "all_gather", progress=CollectiveProgress.enqueued)
    world.writers[0].replace(phase)
    found = world.advance(2.0)
    assert found is not None
    assert found.deadlock is not None


def test_a_rank_that_exits_is_polled_at_once(make: Callable[..., World]) -> None:
    """Even if polls had become rare while it was late."""
    world = make(2, settings=DeadlineSettings())
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.advance(21.0) is None
    world.watch.rank_exited(1)
    world.writers[1].state = RankState.done
    world.writers[1].publish()
    left = world.now
    found = world.advance(10.0)
    assert found is not None
    assert found.deadlock is not None
    assert found.deadlock.culprits == (1,)
    assert world.now - left < 1.5


# blindness


@pytest.mark.parametrize("silent", [{0}, {1}, {0, 1}])
def test_ranks_without_records_are_not_proved_wrong(world: World, silent: set[int]) -> None:
    """Each is listed as blind, with the reason."""
    mismatch(world)
    world.silent = dict.fromkeys(silent, "connection refused")
    assert world.advance(19.0) is None
    assert world.watch.blind == dict.fromkeys(silent, "no collective records: connection refused")
    assert world.watch.suspicion is None


def test_an_unparsable_answer_makes_the_rank_blind(world: World) -> None:
    """The reason names the field, and nothing is proved."""
    mismatch(world)
    world.entries[1][-1]["collective_seq_id"] = "many"
    assert world.advance(10.0) is None
    assert "entries.1.collective_seq_id" in world.watch.blind[1]
    assert 0 not in world.watch.blind


def test_records_that_return_end_the_blindness(world: World) -> None:
    """The deadlock is then proved."""
    mismatch(world)
    world.silent = {1: "no answer within 0.5 s"}
    assert world.advance(10.0) is None
    world.silent = {}
    found = world.advance(10.0)
    assert found is not None
    assert found.deadlock is not None
    assert world.watch.blind == {}


def test_a_late_answer_is_reported_only_if_that_lasts(world: World) -> None:
    """A loaded machine is often late once; a rank that is silent for long cannot be seen."""
    mismatch(world)
    world.silent = {1: NoAnswer("no answer within 0.5 s")}
    assert world.advance(SILENT_SECONDS - 1) is None
    assert len(world.polls) >= 3
    assert world.watch.blind == {}
    assert world.advance(10.0) is None
    assert world.watch.blind == {1: "no collective records: no answer within 0.5 s"}


@pytest.mark.parametrize("unreadable", [{0}, {1}, {0, 1}])
def test_an_unreadable_slot_is_no_reason_to_act(world: World, unreadable: set[int]) -> None:
    """Neither for a proof nor, while other ranks wait for it, for a deadline."""
    mismatch(world)
    world.scan()
    world.unreadable = unreadable
    assert world.advance(200.0, every=0.5) is None
    assert world.watch.suspicion is None
    assert set(world.watch.blind) >= unreadable
    for rank in unreadable:
        assert world.watch.blind[rank] == "its slot on the board cannot be read"


def test_a_slot_that_is_readable_again_is_not_blind(world: World) -> None:
    """Its entry in `blind` is removed."""
    world.unreadable = {1}
    world.advance(1.0)
    world.unreadable = set()
    world.advance(1.0)
    assert world.watch.blind == {}


def test_a_truncated_board_makes_all_ranks_blind(world: World) -> None:
    """Nothing is read beyond the end of the file, which would raise SIGBUS in the supervisor."""
    mismatch(world)
    os.truncate(world.path, 4096)
    assert world.advance(200.0, every=0.5) is None
    assert set(world.watch.blind) == {0, 1}
    assert world.watch.phase_durations.by_rank() == {}
    assert world.watch.collective_logs() == {}
    assert world.watch.phase_durations.merged() == {}


def test_a_rank_whose_process_cannot_be_read_still_has_deadlines(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict says nothing about its interpreter."""
    monkeypatch.setattr(processes, "read_main_thread", lambda pid: None)
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    found = world.advance(25.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.cause, found.stall.culprits) == (Cause.reward_stall, (1,))


# a supervisor that was itself stopped


def suspect_a_stall(world: World) -> None:
    """Until rank 1 is suspected to hang in its reward, and before that is confirmed."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        assert world.advance(0.1) is None


def test_a_pause_withdraws_a_suspicion(world: World) -> None:
    """It is not confirmed by the inactivity of ranks that were stopped as well."""
    suspect_a_stall(world)
    world.now += 60.0
    assert world.scan() is None
    assert world.watch.suspicion is None


def test_a_pause_after_the_end_of_the_scripts_is_not_inactivity(world: World) -> None:
    """The machine may have been stopped while the processes were exiting."""
    at_the_end(world)
    assert world.scan() is None
    world.now += 60.0
    assert world.scan() is None


def test_a_pause_of_the_supervisor_restarts_all_clocks(world: World) -> None:
    """The whole machine may have been stopped."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.advance(19.0) is None
    world.now += 60.0
    assert world.scan() is None
    assert world.watch.suspicion is None
    assert world.advance(19.0) is None
    assert world.advance(3.0) is not None


def test_polls_before_and_after_a_pause_prove_nothing(world: World) -> None:
    """Two polls with a pause of the supervisor between them count as one."""
    mismatch(world)
    while not world.polls:
        world.advance(0.1)
    world.now += SUPERVISOR_PAUSE_SECONDS + 1.0
    assert world.scan() is None
    assert len(world.polls) == 1
    assert world.advance(1.0) is not None
    assert len(world.polls) == 3


def test_scans_two_seconds_apart_are_no_pause(world: World) -> None:
    """A slow machine is not a stopped one."""
    mismatch(world)
    assert world.advance(10.0, every=1.9) is not None


# deadlines


def test_a_rank_that_works_slowly_is_not_overdue(world: World) -> None:
    """Each forward pass restarts the clock."""
    for writer in world.writers:
        writer.replace(Phase.generate)
    ticks = iter(range(10**6))

    def sometimes() -> None:
        if next(ticks) % 20 == 0:
            for writer in world.writers:
                writer.record_work()

    assert world.advance(200.0, every=0.5, doing=sometimes) is None


def test_a_suspected_stall_that_continues_is_cleared(world: World) -> None:
    """All ranks have entered another phase and are within their deadlines."""
    suspect_a_stall(world)
    for writer in world.writers:
        writer.replace(Phase.optimizer)
    assert world.advance(1.0) is None
    assert world.watch.suspicion is None


@pytest.mark.parametrize("silent", [{}, {0: "connection refused"}])
def test_a_rank_that_waits_in_its_backward_for_a_late_rank_is_not_blamed(
    world: World, silent: dict[int, str]
) -> None:
    """It exceeds its deadline because of the other rank, which works.

    Its recorder may or may not answer.
    """
    world.watch.phase_durations.earlier_attempts = {Phase.forward_backward: Durations.of([1.0] + [0.2] * 100)}
    for _ in range(2):  # its first of the attempt is over
        world.writers[0].replace(Phase.forward_backward)
    world.issue(0, "all_reduce", noted=False)
    world.silent = silent
    world.writers[1].replace(Phase.data)
    assert world.advance(600.0, every=0.5, doing=world.writers[1].record_work) is None
    assert world.watch.suspicion is None


def test_a_rank_that_waits_for_an_older_collective_is_not_blamed(world: World) -> None:
    """Its last log entry is an asynchronous collective."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce")
    world.issue(0, "all_reduce", progress=CollectiveProgress.enqueued)
    world.writers[0].replace(Phase.generate)
    world.writers[1].replace(Phase.reward)
    assert world.advance(300.0, every=0.5, doing=world.writers[1].record_work) is None


def test_a_script_that_never_starts_training_is_found(world: World) -> None:
    """It has no open phase: start-up has its own deadline."""
    for writer in world.writers:
        writer.state = RankState.starting
        writer.leave(Phase.data)
        writer.publish()
    assert all(slot is not None and slot.phases == () for slot in world.slots().values())
    found = world.advance(60.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.phase, found.stall.culprits) == (Phase.startup, (0, 1))


def test_a_script_that_hangs_between_two_calls_is_found(world: World) -> None:
    """At the ceiling, because nothing can be learned about the script's own time."""
    for writer in world.writers:
        writer.state = RankState.between
        writer.replace(Phase.idle)
    assert world.advance(39.0, every=0.5) is None
    found = world.advance(21.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert found.stall.phase is Phase.idle


def test_a_checkpoint_that_still_writes_is_not_overdue(world: World) -> None:
    """Bytes count as progress in phases that move bytes, and in no others."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.checkpoint)

    def write() -> None:
        world.io[1] = (world.io[1] or 0) + 64 * 1024

    assert world.advance(100.0, every=0.5, doing=write) is None
    found = world.advance(25.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert found.stall.cause is Cause.checkpoint_stall
    world.begin(1)
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.advance(25.0, every=0.5, doing=write) is not None


@pytest.mark.parametrize("phase", [Phase.startup, Phase.data, Phase.eval, Phase.idle])
def test_a_session_phase_is_not_overdue_while_its_session_computes(world: World, phase: Phase) -> None:
    """Only CPU time shows the work of a tokenizer or of the script's own evaluation."""
    world.writers[1].replace(phase)
    world.issue(0, "all_reduce")

    def compute() -> None:
        world.cpu[1] += 0.4

    assert world.advance(19.0, every=0.5, doing=compute) is None
    found = world.advance(61.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert found.stall.culprits == (1,)


def test_nothing_but_computing_is_overdue_at_the_deadline_without_observations(
    make: Callable[..., World],
) -> None:
    """An endless loop in a callback is ended, but not before half an hour; data transferred meanwhile is progress."""
    world = make(settings=DeadlineSettings(ceiling_seconds=4000.0))
    world.watch.phase_durations.earlier_attempts = {Phase.data: Durations.of([0.01] * 30)}
    for _ in range(2):
        world.writers[1].replace(Phase.data)
    world.issue(0, "all_reduce")

    def compute() -> None:
        world.cpu[1] += 0.5

    def fetch() -> None:
        compute()
        io_bytes = world.io[1]
        assert io_bytes is not None
        world.io[1] = io_bytes + 64 * 1024

    assert world.advance(2000.0, every=0.5, doing=fetch) is None
    assert world.advance(1750.0, every=0.5, doing=compute) is None
    found = world.advance(100.0, every=0.5, doing=compute)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.deadline_seconds) == ((1,), 1800.0)
    assert "CPU time as the only activity" in found.stall.sentence


def test_a_reward_that_only_computes_is_overdue(world: World) -> None:
    """An endless regular expression is an example."""
    world.writers[1].replace(Phase.reward)
    world.issue(0, "all_reduce")

    def compute() -> None:
        world.cpu[1] += 0.4

    found = world.advance(25.0, every=0.5, doing=compute)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.phase) == ((1,), Phase.reward)


def test_a_rank_that_issues_collectives_is_not_overdue(world: World) -> None:
    """This holds in every phase."""
    for writer in world.writers:
        writer.replace(Phase.generate)

    def gather() -> None:
        for rank in (0, 1):
            world.complete(rank, world.issue(rank, "all_gather"))

    assert world.advance(120.0, every=0.5, doing=gather) is None
    found = world.advance(25.0, every=0.5)
    assert found is not None
    assert found.stall is not None


def test_a_stopped_process_is_named_as_such(world: World) -> None:
    """A slot that says that it waits does not matter."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    world.process_state[1] = "T"
    world.frozen = {1}
    found = world.advance(25.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.cause, found.stall.culprits) == (Cause.interpreter_stuck, (1,))
    assert "SIGSTOP" in found.stall.sentence


def test_an_interpreter_that_does_not_run_is_named_as_such(world: World) -> None:
    """Its heartbeat is old."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    world.frozen = {1}
    found = world.advance(25.0)
    assert found is not None
    assert found.stall is not None
    assert found.stall.cause is Cause.interpreter_stuck


def test_a_rank_in_uninterruptible_sleep_is_marked(world: World) -> None:
    """A restart would find its device still in use."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    world.process_state[1] = "D"
    found = world.advance(25.0)
    assert found is not None
    assert found.stall is not None
    assert found.stall.uninterruptible


def test_no_rank_is_blamed_when_all_wait_in_their_backward(world: World) -> None:
    """The recorders are fetched before any rank is named: all wait in C++."""
    for rank in (0, 1):
        world.writers[rank].replace(Phase.forward_backward)
        world.issue(rank, "all_reduce", noted=False)
    found = world.advance(25.0)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.cause) == ((), Cause.no_progress)


def test_learned_durations_set_the_deadline(world: World) -> None:
    """After 100 rewards of 1 s, 20 s are too long."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    world.issue(0, "all_reduce")
    for _ in range(2):  # its first reward of the attempt is over
        world.writers[1].replace(Phase.reward)
    found = world.advance(12.0)
    assert found is not None
    assert found.stall is not None
    assert found.stall.deadline_seconds < 10


def overdue_after_rewards_of_a_second(world: World) -> Finding:
    """Rank 1 hangs in a reward, while the other waits."""
    world.issue(0, "all_reduce")
    for _ in range(2):  # its first reward of the attempt is over
        world.writers[1].replace(Phase.reward)
    found = world.advance(38.0)
    assert found is not None
    return found


def test_a_phase_that_a_deadline_ended_gets_five_times_as_long(world: World) -> None:
    """If it was only slow, the next attempt completes it; a second end multiplies the deadline again."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    waited = []
    for attempt in (1, 2):
        stall = overdue_after_rewards_of_a_second(world).stall
        assert stall is not None
        waited.append(stall.waited_seconds)
        world.watch.phase_durations.earlier_attempts = world.watch.phase_durations.merged()
        world.begin(attempt)
    assert waited[1] == pytest.approx(5 * waited[0], abs=1.5)


def test_a_suspicion_does_not_extend_a_deadline(world: World) -> None:
    """Only an end does."""
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([1.0] + [0.2] * 100)}
    world.issue(0, "all_reduce")
    for _ in range(2):
        world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        assert world.advance(0.1) is None
    assert world.watch.phase_durations.merged()[Phase.reward].ended_seconds == 0.0
    assert world.advance(1.0) is not None
    assert world.watch.phase_durations.merged()[Phase.reward].ended_seconds > 4.0


@pytest.mark.parametrize(
    ("lasts", "remembered"), [(200.0, 200.0), (3600.0, 3600.0), (1e6, 0.0), (math.inf, 0.0)]
)
def test_a_sleep_beyond_its_deadline_is_remembered_if_its_end_is_in_sight(
    world: World, monkeypatch: pytest.MonkeyPatch, lasts: float, remembered: float
) -> None:
    """The next attempt waits for it. One that lasts for days would make all later deadlines useless."""
    world.watch.settings = DeadlineSettings()
    sleeping = Stall(
        cause=Cause.no_progress, culprits=(1,), waiters=(0,), phase=Phase.callback, callback="Upload.on_save",
        deadline_seconds=60.0, waited_seconds=7.0, lasts_seconds=lasts, sentence="It sleeps.", confidence="proved",
    )  # fmt: skip
    found = Finding(stall=sleeping, began_at_seconds=world.now)
    monkeypatch.setattr(world.watch._waits, "scan", lambda slots, now: found)
    assert world.scan() is found
    learned = world.watch.phase_durations.merged().get("Upload.on_save", Durations())
    assert learned.ended_seconds == remembered


@pytest.mark.parametrize(("lasts", "again"), [(math.inf, False), (1e6, True)])
def test_the_same_wait_is_proved_once_at_a_step(
    world: World, monkeypatch: pytest.MonkeyPatch, lasts: float, again: bool
) -> None:
    """A wrong proof would repeat in every attempt. The second time the deadline decides; another step is another wait."""
    stuck = Stall(
        cause=Cause.no_progress, culprits=(1,), waiters=(0,), phase=Phase.reward, deadline_seconds=60.0,
        waited_seconds=7.0, lasts_seconds=lasts, sentence="It waits for a lock.", confidence="proved",
    )  # fmt: skip
    found = Finding(stall=stuck, began_at_seconds=world.now)
    monkeypatch.setattr(world.watch._waits, "scan", lambda slots, now: found)
    assert world.scan() is found
    assert (world.scan() is found) == again
    world.writers[1].step += 1
    world.writers[1].publish()
    assert world.scan() is found


# quiet and frozen ranks


def hang_in(world: World, phase: Phase) -> None:
    """Rank 1 does nothing in a phase that it has never completed; rank 0 waits."""
    world.issue(0, "all_reduce")
    if phase is Phase.callback:
        world.writers[1].enter_callback("Upload.on_save")
    else:
        world.writers[1].replace(phase)


PHASES = [Phase.startup, Phase.data, Phase.reward, Phase.eval, Phase.idle, Phase.callback]


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_does_nothing_is_hung_after_a_minute_in_any_phase(
    make: Callable[..., World], phase: Phase
) -> None:
    """Also at its first occurrence; not within a pause of 50 s."""
    world = make(settings=DeadlineSettings())
    hang_in(world, phase)
    assert world.advance(55.0, every=0.5) is None
    found = world.advance(20.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.waiters, found.stall.phase) == ((1,), (0,), phase)
    assert found.stall.deadline_seconds == 60.0


@pytest.mark.parametrize("what", ["another rank works", "another node", "unreadable", "connected", "traced"])
def test_a_rank_that_does_nothing_is_left_alone_if_something_may_work_for_it(
    make: Callable[..., World], what: str
) -> None:
    """What cannot be seen is unknown."""
    world = make(3, settings=DeadlineSettings(), world_size=4 if what == "another node" else 3)
    hang_in(world, Phase.reward)
    world.issue(2, "all_reduce")
    if what == "another rank works":
        world.writers[2].collective_log.mark(1, CollectiveProgress.completed)
        world.entries[2][-1]["retired"] = True
    elif what == "unreadable":
        world.io[1] = None
    elif what == "connected":
        world.connected = {1}
    elif what == "traced":
        world.process_state[1] = "t"

    def compute() -> None:
        world.cpu[2] += 0.5

    assert world.advance(280.0, every=0.5, doing=compute) is None
    found = world.advance(40.0, every=0.5, doing=compute)
    assert (found is not None) is (what == "connected")


def test_a_rank_is_not_blamed_for_the_time_in_which_another_one_worked(make: Callable[..., World]) -> None:
    """It may have waited for that rank, by other means than a collective."""
    world = make(settings=DeadlineSettings())
    world.writers[1].replace(Phase.reward)

    def work() -> None:
        world.cpu[0] += 0.5
        world.writers[0].publish()

    assert world.advance(100.0, every=0.5, doing=work) is None
    world.issue(0, "all_reduce")
    world.writers[0].publish()
    assert world.advance(50.0, every=0.5) is None
    assert world.advance(20.0, every=0.5) is not None


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["stopped", "holds the interpreter"])
def test_a_frozen_interpreter_is_found_within_half_a_minute_in_any_phase(
    make: Callable[..., World], phase: Phase, how: str
) -> None:
    """A stopped process, and one whose thread runs without releasing the interpreter."""
    world = make(settings=DeadlineSettings())
    hang_in(world, phase)
    world.frozen = {1}
    if how == "stopped":
        world.process_state[1] = "T"

    def compute() -> None:
        world.cpu[1] += 0.5 if how != "stopped" else 0.0

    assert world.advance(18.0, every=0.5, doing=compute) is None
    found = world.advance(10.0, every=0.5, doing=compute)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.culprits, found.stall.cause) == ((1,), Cause.interpreter_stuck)


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_starved_machine_freezes_nobody(make: Callable[..., World], share: float) -> None:
    """A main thread that waits for a CPU gets little of it, and its heartbeat none."""
    world = make(settings=DeadlineSettings())
    hang_in(world, Phase.reward)
    world.frozen = {1}
    world.process_state[1] = "R"

    def starve() -> None:
        world.cpu[1] += 0.5 * share

    assert world.advance(300.0, every=0.5, doing=starve) is None


def test_the_only_rank_is_not_suspended_by_being_stopped(make: Callable[..., World]) -> None:
    """Whoever suspends a job stops its supervisor too. The deadline that is shown is the one that ends the rank."""
    world = make(settings=DeadlineSettings(), ranks=1)
    world.writers[0].replace(Phase.reward)
    world.process_state[0] = "T"
    world.frozen = {0}
    assert world.advance(15.0, every=0.5) is None
    assert world.watch.suspended_since is None
    assert world.watch.awaited is not None
    ends_in = world.watch.awaited.deadline_at_seconds - world.now
    assert 0 < ends_in < 10
    found = world.advance(ends_in + 5.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert (found.stall.cause, found.stall.culprits) == (Cause.interpreter_stuck, (0,))


def test_a_suspended_job_with_one_rank_survives(make: Callable[..., World]) -> None:
    """The supervisor is continued first."""
    world = make(settings=DeadlineSettings(), ranks=1)
    world.writers[0].replace(Phase.reward)
    world.process_state[0] = "T"
    world.frozen = {0}
    world.scan()
    world.now += 600.0
    assert world.advance(15.0, every=0.5) is None
    world.process_state[0] = "S"
    world.frozen = set()
    assert world.advance(50.0, every=0.5) is None


def test_a_deadline_is_shown_that_has_not_passed_while_the_job_is_suspended(
    make: Callable[..., World],
) -> None:
    """No other deadline runs meanwhile."""
    world = make(settings=DeadlineSettings())
    hang_in(world, Phase.reward)
    for rank in (0, 1):
        world.process_state[rank] = "T"
    world.frozen = {0, 1}
    assert world.advance(200.0, every=0.5) is None
    assert world.watch.suspended_since is not None
    if world.watch.awaited is not None:
        assert world.watch.awaited.deadline_at_seconds > world.now


def in_a_short_reward(make: Callable[..., World]) -> World:
    """Rank 1 is in a reward, which usually takes 10 ms, and rank 0 waits for it."""
    world = make(settings=DeadlineSettings())
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([0.01] * 30)}
    world.issue(0, "all_reduce")
    for _ in range(2):
        world.writers[1].replace(Phase.reward)
    return world


def test_a_reward_that_computes_is_named_early_and_ended_late(make: Callable[..., World]) -> None:
    """It cannot be told from an endless loop."""
    world = in_a_short_reward(make)

    def compute() -> None:
        world.cpu[1] += 0.5

    assert world.advance(290.0, every=0.5, doing=compute) is None
    assert world.watch.awaited is not None
    assert (world.watch.awaited.rank, world.watch.awaited.busy) == (1, True)
    found = world.advance(15.0, every=0.5, doing=compute)
    assert found is not None
    assert found.stall is not None
    assert "deadline 300 s, with CPU time as the only activity" in found.stall.sentence


def test_a_reward_that_stops_computing_gets_the_usual_deadline_again(make: Callable[..., World]) -> None:
    """It may wait for a sandbox now."""
    world = in_a_short_reward(make)

    def compute() -> None:
        world.cpu[1] += 0.5

    assert world.advance(100.0, every=0.5, doing=compute) is None
    assert world.advance(50.0, every=0.5) is None
    assert world.advance(20.0, every=0.5) is not None


@pytest.mark.parametrize("connected", [True, False])
def test_a_connection_to_outside_lengthens_a_learned_deadline(
    make: Callable[..., World], connected: bool
) -> None:
    """A server is slow once, while the rank computes a little, so that it is not quiet."""
    world = in_a_short_reward(make)
    world.connected = {1} if connected else set()

    def compute() -> None:
        world.cpu[1] += 0.01

    found = world.advance(290.0, every=0.5, doing=compute)
    assert (found is None) is connected
    if found is not None:
        return
    assert world.watch.awaited is not None
    assert world.watch.awaited.deadline_at_seconds - world.watch.awaited.since_seconds == 300.0
    found = world.advance(15.0, every=0.5, doing=compute)
    assert found is not None
    assert found.stall is not None
    assert found.stall.culprits == (1,)
    assert "with a connection to a process outside the job" in found.stall.sentence


def test_ranks_that_are_all_stopped_are_given_five_minutes_and_their_clocks_start_again(
    make: Callable[..., World],
) -> None:
    """A scheduler that preempts a job stops all of its processes, and continues them later."""
    world = make(settings=DeadlineSettings())
    world.watch.phase_durations.earlier_attempts = {Phase.reward: Durations.of([0.01] * 30)}
    for writer in world.writers:
        for _ in range(2):
            writer.replace(Phase.reward)
    for rank in (0, 1):
        world.process_state[rank] = "T"
    world.frozen = {0, 1}
    assert world.advance(290.0, every=0.5) is None
    for rank in (0, 1):
        world.process_state[rank] = "S"
    world.frozen = set()
    assert world.advance(55.0, every=0.5) is None, "the clocks start again"
    for rank in (0, 1):
        world.process_state[rank] = "T"
    world.frozen = {0, 1}
    found = world.advance(310.0, every=0.5)
    assert found is not None
    assert found.stall is not None
    assert found.stall.deadline_seconds == 300.0


def test_the_awaited_rank_is_shown_with_its_nearest_deadline(make: Callable[..., World]) -> None:
    """Half an hour without observations; a minute once it is seen to do nothing."""
    world = make(settings=DeadlineSettings())
    hang_in(world, Phase.reward)
    assert world.advance(1.5, every=0.5) is None
    assert world.watch.awaited is None
    assert world.advance(1.5, every=0.5) is None
    awaited = world.watch.awaited
    assert awaited is not None
    assert (awaited.rank, awaited.phase, awaited.waiters, awaited.busy) == (1, Phase.reward, (0,), None)
    assert awaited.deadline_at_seconds == pytest.approx(1000.0 + 1800.0)
    assert world.advance(27.0, every=0.5) is None
    awaited = world.watch.awaited
    assert awaited is not None
    assert awaited.busy is False
    assert awaited.deadline_at_seconds == pytest.approx(1000.0 + 60.0, abs=10.0)


# the script's end


def at_the_end(world: World) -> None:
    """All scripts have run their last line."""
    for writer in world.writers:
        writer.state = RankState.done
        writer.publish()


def test_an_inactive_process_after_the_end_is_found(world: World) -> None:
    """After the deadline for exits; only the rank that is still there is named."""
    at_the_end(world)
    world.watch.rank_exited(0)
    assert world.advance(3.5) is None
    found = world.advance(4.0)
    assert found is not None
    assert found.stall is not None
    assert found.stall.culprits == (1,)
    assert "training was complete" in found.stall.sentence


def test_a_connected_process_gets_longer_to_exit(world: World) -> None:
    """An upload may wait for its answer."""
    at_the_end(world)
    world.connected = {0}
    assert world.advance(299.0, every=0.5) is None
    assert world.advance(5.0, every=0.5) is not None


def test_a_rank_that_does_not_exit_is_awaited(world: World) -> None:
    """With the deadline of its process, which is long while it computes."""
    at_the_end(world)
    world.watch.rank_exited(0)
    assert world.advance(2.5) is None
    waited = world.watch.awaited
    assert waited is not None
    assert (waited.rank, waited.exiting, waited.busy) == (1, True, False)
    assert waited.deadline_at_seconds - world.now < TIGHT.exit_seconds

    def compute() -> None:
        world.cpu[1] += 0.1

    world.advance(5.0, doing=compute)
    waited = world.watch.awaited
    assert waited is not None
    assert waited.busy
    assert waited.deadline_at_seconds - world.now > TIGHT.ceiling_seconds - 15


def test_the_end_of_the_scripts_clears_a_suspected_stall(world: World) -> None:
    """The script has run its last line after all."""
    suspect_a_stall(world)
    at_the_end(world)
    assert world.advance(0.1) is None
    assert world.watch.suspicion is None


def test_a_process_that_works_after_the_end_is_not_reported(world: World) -> None:
    """An upload may take hours."""
    at_the_end(world)

    def work() -> None:
        world.io[1] = (world.io[1] or 0) + 64 * 1024

    assert world.advance(600.0, every=0.5, doing=work) is None


def test_a_process_whose_io_cannot_be_read_after_the_end_is_not_reported(world: World) -> None:
    """Unknown is not zero: it may be uploading."""
    at_the_end(world)
    world.io = {0: None, 1: None}
    assert world.advance(60.0, every=0.5) is None


# attempts


def test_nothing_of_an_earlier_attempt_survives(world: World) -> None:
    """No suspicion, poll or recording: two polls are needed again."""
    mismatch(world)
    while not world.polls:
        world.advance(0.1)
    assert world.watch.suspicion
    assert world.watch.recordings
    world.begin(1)
    assert world.watch.suspicion is None
    assert world.watch.recordings == {}
    assert world.watch.collective_logs() == {0: [], 1: []}
    mismatch(world)
    while not world.polls:
        assert world.advance(0.1) is None
    assert world.advance(1.0) is not None


def test_blindness_ends_with_the_attempt(world: World) -> None:
    """The slots of the next attempt are others."""
    world.scan()
    world.unreadable = {1}
    world.advance(UNREADABLE_SECONDS + 0.2)
    assert world.watch.blind
    world.unreadable = set()
    world.begin(1)
    assert world.watch.blind == {}


def test_a_suspicion_of_an_earlier_attempt_is_not_confirmed(world: World) -> None:
    """The next attempt's first check raises a suspicion of its own."""
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    while world.watch.suspicion is None:
        world.advance(0.1)
    world.begin(1)
    world.issue(0, "all_reduce")
    world.writers[1].replace(Phase.reward)
    assert world.advance(19.0) is None


def test_durations_add_up_over_attempts(world: World) -> None:
    """Those of the last attempt from the journal, then those of the current one."""
    for writer in world.writers:
        for seconds in (3.0, 1.0, 1.0):
            writer.replace(Phase.reward)
            world.now += seconds
            writer.replace(Phase.data)
    first = world.watch.phase_durations.merged()[Phase.reward]
    assert (first.count, first.first_seconds, first.max_seconds) == (
        2,
        pytest.approx(3.0),
        pytest.approx(1.0),
    )
    world.watch.phase_durations.earlier_attempts = world.watch.phase_durations.merged()
    world.begin(1)
    assert world.watch.phase_durations.merged()[Phase.reward] == first
    for seconds in (5.0, 2.0):
        world.writers[0].replace(Phase.reward)
        world.now += seconds
        world.writers[0].replace(Phase.data)
    both = world.watch.phase_durations.merged()[Phase.reward]
    assert (both.count, both.first_seconds, both.max_seconds) == (3, pytest.approx(5.0), pytest.approx(2.0))


def test_merging_durations_twice_counts_them_once(world: World) -> None:
    """They are merged at every check."""
    world.writers[0].replace(Phase.reward)
    world.writers[0].replace(Phase.reward)
    world.writers[0].replace(Phase.data)
    assert world.watch.phase_durations.merged() == world.watch.phase_durations.merged()
    assert world.watch.phase_durations.merged()[Phase.reward].count == 1


# positions, for a fault that exits tell of


def test_positions_of_exited_ranks_come_from_their_logs(world: World) -> None:
    """No request is sent to an exited rank; a running one that does not answer is unknown."""
    mismatch(world)
    world.silent = {0: "reset"}
    positions = world.watch.positions(world.slots(), exited={0: False, 1: True})
    assert positions[0].records is None
    assert positions[1].exited
    assert [one.operation for one in positions[1].records or ()] == ["all_reduce", "all_gather"]
    assert world.watch.blind == {0: "no collective records: reset"}


def test_the_position_of_an_exited_rank_without_a_slot_is_unknown(world: World) -> None:
    """No records do not mean that it issued none."""
    mismatch(world)
    world.unreadable = {1}
    assert world.watch.positions(world.slots(), exited={0: False, 1: True})[1].records is None


def test_collective_logs_are_plain_values(world: World) -> None:
    """They are written to a file as JSON."""
    world.issue(0, "all_reduce", line=88)
    (note,) = json.loads(json.dumps(world.watch.collective_logs()[0]))
    assert (note["operation"], note["progress"], note["at"]) == (
        "all_reduce",
        "waiting",
        "train.py:88 in main",
    )
