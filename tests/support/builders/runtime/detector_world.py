"""Ranks of one node as the hang detector sees them: a real board, their Flight Recorders and their
processes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board import collective_log, slot_writer
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.processes import usage as process_usage
from grpo_run.runtime.processes.usage import TreeUsage
from grpo_run.runtime.supervisor.detection import _collective_records as collective_records
from grpo_run.runtime.supervisor.detection._wait_looks import LookReader
from grpo_run.runtime.supervisor.detection.detector import HangDetector
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog import processes
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import THREADS_HANDLER, ThreadReport
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.processes import MainThread
from grpo_run.watchdog.run_processes import connections
from grpo_run.watchdog.run_processes.connections import Connections
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts, ProcessUsage
from grpo_run.watchdog.stalls.process_clocks import ThreadReading
from grpo_run.watchdog.stalls.stall import Stall
from support.collective_entries import add_entry

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
        monkeypatch.setattr(collective_records, "fetch", self._fetch)
        monkeypatch.setattr(processes, "read_main_thread", self._main_thread)
        monkeypatch.setattr(LookReader, "main_thread_may_be_stuck", lambda self, pid: False)
        monkeypatch.setattr(process_usage, "find_process_trees", lambda pids: {pid: [pid] for pid in pids})
        monkeypatch.setattr(process_usage, "read_tree_usage", self._tree_usage)
        monkeypatch.setattr(process_usage, "read_threads", self._tree_threads)
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
        self.nccl_entries: dict[int, list[dict[str, Any]]] | None = None
        """Of NCCL's recorder; None for a build of torch without it."""
        self.silent_nccl: dict[int, str] = {}
        self.asked_nccl: list[set[int]] = []
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
        self,
        rank: int,
        operation: str,
        *,
        progress: CollectiveProgress = CollectiveProgress.waiting,
        elements: int = 3,
        line: int = 88,
        group: str = "0",
        noted: bool = True,
    ) -> int:
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
            self.writers[rank].collective_log, group=group, sequence=sequence, operation=operation,
            sizes=str(elements), dtypes="Float",
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

    def scan(self) -> HangFinding | None:
        """Scan once; every running interpreter has just stamped its heartbeat."""
        if self.board.has_full_size:
            for rank, writer in enumerate(self.writers):
                if rank not in self.frozen:
                    writer.heartbeat()
        return self.watch.scan(self.slots())

    def advance(
        self, seconds: float, *, every: float = 0.1, doing: Callable[[], None] = lambda: None
    ) -> HangFinding | None:
        """Scan for this long; stop at the first finding."""
        until = self.now + seconds
        while self.now < until - 1e-9:
            self.now += every
            doing()
            found = self.scan()
            if found is not None:
                return found
        return None

    def stalls(
        self, seconds: float, *, every: float = 0.1, doing: Callable[[], None] = lambda: None
    ) -> Stall:
        """Scan for this long; return the stall that is found."""
        found = self.advance(seconds, every=every, doing=doing)
        assert found is not None
        assert found.stall is not None
        return found.stall

    def deadlocks(self, seconds: float) -> Deadlock:
        """Scan for this long; return the deadlock that is found."""
        found = self.advance(seconds)
        assert found is not None
        assert found.deadlock is not None
        return found.deadlock

    def computing(self, rank: int, seconds: float) -> Callable[[], None]:
        """Return what to do before each scan so that the rank uses the CPU for this long."""

        def compute() -> None:
            self.cpu[rank] += seconds

        return compute

    def begin_backward(self, rank: int, group: str = "0") -> None:
        """Let a rank enter a DDP backward pass, of which the log has one entry."""
        self.writers[rank].replace(Phase.forward_backward)
        add_entry(
            self.writers[rank].collective_log, group=group, sequence=self.sequences[rank, group] + 1,
            operation="backward", sizes="", dtypes="",
            file="/home/user/train.py", line=70, function="main", step=8,
        )  # fmt: skip

    def _fetch(
        self,
        sockets: dict[int, str],
        seconds: float,
        handler: str = collective_records.FLIGHT_RECORDER_HANDLER,
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        failures = {rank: self.silent[rank] for rank in sockets if rank in self.silent}
        if handler == THREADS_HANDLER:
            self.asked.append(set(sockets))
            failures |= {rank: "no answer" for rank in sockets if rank in self.frozen}
            return {rank: self._threads(rank) for rank in sockets if rank not in failures}, failures
        entries = self.entries
        if handler == collective_records.NCCL_RECORDER_HANDLER:
            self.asked_nccl.append(set(sockets))
            if self.nccl_entries is None:
                return {}, dict.fromkeys(sockets, "answered b'HTTP/1.1 404 Not Found'")
            entries, failures = self.nccl_entries, dict(self.silent_nccl)
        else:
            self.polls.append(self.now)
        answers = {
            rank: json.dumps({"entries": entries[rank], "pg_config": self.groups}).encode()
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

    def _tree_usage(self, members: list[int]) -> TreeUsage | None:
        ranks = [pid - 100 for pid in members]
        told = [io_bytes for rank in ranks if (io_bytes := self.io[rank]) is not None]
        if len(told) < len(ranks):
            return None
        cpu_seconds = sum(self.cpu[rank] for rank in ranks)
        return TreeUsage(members=frozenset(members), cpu_seconds=cpu_seconds, io_bytes=sum(told))

    def _tree_threads(self, members: list[int]) -> dict[int, ThreadReading]:
        threads = {
            pid: ThreadReading(self.process_state[pid - 100], self.cpu[pid - 100], "python")
            for pid in members
        }
        if self.some_thread_runs:
            threads |= {pid + 100: ThreadReading("R", 0.0, "worker") for pid in members}
        return threads

    def _connections(
        self, members: dict[int, list[int]], supervisor: list[int]
    ) -> dict[int, Connections | None]:
        return {
            rank: Connections(outside="10.0.0.5:8000" if rank in self.connected else "", traffic_bytes=0)
            for rank in members
        }


def mismatch(world: World) -> None:
    """Both ranks have reduced once; then one reduces and the other gathers."""
    for rank in (0, 1):
        world.issue(rank, "all_reduce", progress=CollectiveProgress.completed)
    world.issue(0, "all_reduce", line=88)
    world.issue(1, "all_gather", line=91)


def move_to_nccl(world: World) -> None:
    """What the ranks have issued was NCCL's: the other recorder holds only a vote of grpo-run."""
    vote = {
        "process_group": ["grpo_run/votes", ""], "pg_id": 9, "collective_seq_id": 1,
        "profiling_name": "gloo:all_reduce", "retired": True, "time_created_ns": 0,
    }  # fmt: skip
    world.nccl_entries = {
        rank: [
            entry | {"profiling_name": entry["profiling_name"].replace("gloo", "nccl"), "time_created_ns": 1}
            for entry in entries
        ]
        for rank, entries in world.entries.items()
    }
    world.entries = {rank: [vote] for rank in world.entries}


def suspect_a_stall(world: World) -> None:
    """Until rank 1 is suspected to hang in its reward, and before that is confirmed."""
    hang_in(world, Phase.reward)
    while world.watch.suspicion is None:
        assert world.advance(0.1) is None


def hang_in(world: World, phase: Phase) -> None:
    """Rank 1 does nothing in a phase that it has never completed; rank 0 waits."""
    world.issue(0, "all_reduce")
    if phase is Phase.callback:
        world.writers[1].enter_callback("Upload.on_save")
    else:
        world.writers[1].replace(phase)


PHASES = [Phase.startup, Phase.data, Phase.reward, Phase.eval, Phase.idle, Phase.callback]


def at_the_end(world: World) -> None:
    """All scripts have run their last line."""
    for writer in world.writers:
        writer.state = RankState.done
        writer.publish()
