"""Ranks of one node as the hang detector sees them, in training: the shell of transcripts.

The board is a real one. Flight Recorders, processes and threads are what the story says. Time passes on
request, from 0 s. Ranks are `0`, `0,1` or `all`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board import collective_log, slot_writer
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.processes import usage as process_usage
from grpo_run.runtime.supervisor.detection import _collective_records as collective_records
from grpo_run.runtime.supervisor.detection import _wait_detector as wait_detector
from grpo_run.runtime.supervisor.detection.detector import HangDetector
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog import processes
from grpo_run.watchdog.deadlocks.collectives import CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import THREADS_HANDLER, ThreadReport
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.run_processes import connections
from grpo_run.watchdog.run_processes.connections import Connections
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts, ProcessUsage
from grpo_run.watchdog.stalls.process_clocks import ThreadReading, TreeReading
from grpo_run.watchdog.waits.looks import Process, RankLook, Wait, WaitingThread, WaitKind
from support.builders.watchdog.stall_shell import durations_of, key_of
from support.collective_entries import add_entry

MAIN_THREAD = processes.ProcessStat(
    pid=0, name="python", state="S", parent=0, session=0, cpu_seconds=0.0, children_cpu_seconds=0.0,
    started_ticks=0,
)  # fmt: skip
TIGHT = {
    "floor_seconds": 4.0, "first_floor_seconds": 20.0, "first_seconds": 20.0, "startup_seconds": 20.0,
    "evaluation_seconds": 20.0, "ceiling_seconds": 40.0, "exit_seconds": 4.0,
}  # fmt: skip
PROGRESS = {
    "waits": CollectiveProgress.waiting, "enqueued": CollectiveProgress.enqueued,
    "completed": CollectiveProgress.completed,
}  # fmt: skip
START = 1000.0


class DetectorShell:
    """Two ranks in `data`, with short deadlines and threads that always run: only learned deadlines count."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = START
        self.folder = folder
        clock = SimpleNamespace(monotonic_ns=lambda: round(self.now * 1e9))
        for module in (slot_writer, collective_log):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(collective_records, "fetch", self._fetch)
        monkeypatch.setattr(processes, "read_main_thread", self._main_thread)
        monkeypatch.setattr(wait_detector, "LookReader", lambda: _Looks(self))
        monkeypatch.setattr(process_usage, "find_process_trees", lambda pids: {pid: [pid] for pid in pids})
        monkeypatch.setattr(process_usage, "read_tree_usage", self._tree_usage)
        monkeypatch.setattr(process_usage, "read_threads", self._tree_threads)
        monkeypatch.setattr(connections, "read_connections", self._connections)
        self.node("2", "tight")

    # what is observed

    def node(self, ranks: str, deadlines: str = "default", world: str = "", **settings: str) -> None:
        """So many ranks, with the default deadlines or short ones, and no threads that run."""
        changed = {name: float(value) for name, value in settings.items()}
        given = DeadlineSettings(**((TIGHT if deadlines == "tight" else {}) | changed))
        self.path = self.folder / f"board{ranks}{deadlines}{len(changed)}.mmap"
        self.board = Board.create(self.path, int(ranks))
        self.watch = HangDetector(self.board, given, observe_exit=self._remaining, clock=lambda: self.now)
        self.busy_threads = deadlines == "tight"
        self.world_size = int(world or ranks)
        self.begin("0")

    def begin(self, attempt: str) -> None:
        """Start all ranks again, in the `data` phase of their first `train()` call."""
        self.board.begin_attempt(int(attempt))
        ranks = range(self.board.slots)
        self.polled: list[float] = []
        self.threads_asked: list[set[int]] = []
        self.nccl_asked: list[set[int]] = []
        self.looked: list[tuple[float, tuple[int, ...]]] = []
        self.active_threads: set[int] = set()
        self.switches: Counter[int] = Counter()
        self.entries: dict[int, list[dict[str, Any]]] = {rank: [] for rank in ranks}
        self.nccl_entries: dict[int, list[dict[str, Any]]] | None = None
        self.group_members: dict[str, dict[str, str]] = {}
        self.failures: dict[str, dict[int, str]] = {"gloo": {}, "nccl": {}}
        self.cpu = dict.fromkeys(ranks, 10.0)
        self.io: dict[int, int | None] = dict.fromkeys(ranks, 1000)
        self.states: dict[int, str | None] = dict.fromkeys(ranks, "S")
        self.other_threads: dict[int, dict[int, ThreadReading] | None] = {}
        self.thread_waits: dict[int, list[Wait]] = {}
        self.frozen_ranks: set[int] = set()
        self.connected_ranks: set[int] | None = set()
        self.unreadable_ranks: set[int] = set()
        self.refused: dict[int, str] = {}
        self.sequences: Counter[tuple[int, str]] = Counter()
        self.notes: dict[int, int] = {}
        self.writers = [self.board.writer(r, rank=r, pid=100 + r, attempt=int(attempt)) for r in ranks]
        for writer in self.writers:
            writer.state, writer.train_call, writer.step = RankState.training, 1, 7
            writer.replace(Phase.data)
            writer.publish()
        pids = {rank: 100 + rank for rank in ranks}
        sockets = {rank: f"/run/rank{rank}.sock" for rank in ranks}
        self.watch.begin_attempt(self.board, {rank: rank for rank in ranks}, pids, sockets, self.world_size)

    # what ranks do

    def issue(
        self, ranks: str, operation: str, progress: str = "waits", *, line: str = "88", group: str = "0",
        native: str = "",
    ) -> None:  # fmt: skip
        """Ranks issue a collective, from Python unless it is `native`."""
        for rank in self._ranks(ranks):
            self.sequences[rank, group] += 1
            sequence = self.sequences[rank, group]
            self.entries[rank].append(
                {
                    "process_group": [group, "default_pg"], "pg_id": 0, "collective_seq_id": sequence,
                    "profiling_name": f"gloo:{operation}", "input_sizes": [[3]], "input_dtypes": ["Float"],
                    "state": "scheduled", "retired": progress == "completed", "thread_id": "1",
                }
            )  # fmt: skip
            if not native:
                self.notes[rank] = add_entry(
                    self.writers[rank].collective_log, group=group, sequence=sequence, operation=operation,
                    sizes="3", dtypes="Float", file="/home/user/train.py", line=int(line), function="main",
                    step=8, progress=PROGRESS[progress],
                )  # fmt: skip

    def note(self, ranks: str, operation: str, progress: str, **fields: str) -> None:
        """Ranks log a collective that the Flight Recorder does not have; `on_device` and `sequence`."""
        for rank in self._ranks(ranks):
            given: dict[str, Any] = {"sequence": int(fields.get("sequence", 1))}
            given |= {"on_device": True} if "on_device" in fields else {}
            add_entry(
                self.writers[rank].collective_log, operation=operation, progress=PROGRESS[progress], **given
            )

    def complete(self, ranks: str) -> None:
        """The last collective of ranks completes."""
        for rank in self._ranks(ranks):
            self.entries[rank][-1]["retired"] = True
            self.writers[rank].collective_log.mark(self.notes[rank], CollectiveProgress.completed)

    def backward(self, ranks: str, group: str = "0") -> None:
        """Ranks enter a DDP backward pass, of which the log has one entry."""
        for rank in self._ranks(ranks):
            self.writers[rank].replace(Phase.forward_backward)
            add_entry(
                self.writers[rank].collective_log, group=group, sequence=self.sequences[rank, group] + 1,
                operation="backward", sizes="", dtypes="", file="/home/user/train.py", line=70, function="f",
                step=8,
            )  # fmt: skip

    def replace(self, ranks: str, *phases: str) -> None:
        """Ranks are in each of these phases, one after another."""
        for rank in self._ranks(ranks):
            for phase in phases:
                self.writers[rank].replace(Phase[phase])

    def enter(self, ranks: str, phase: str) -> None:
        """Ranks enter an inner phase, or a callback."""
        for rank in self._ranks(ranks):
            if phase in Phase.__members__:
                self.writers[rank].enter(Phase[phase])
            else:
                self.writers[rank].enter_callback(phase)

    def leave(self, ranks: str, phase: str) -> None:
        """Ranks leave a phase."""
        for rank in self._ranks(ranks):
            self.writers[rank].leave(Phase[phase])

    def work(self, ranks: str) -> None:
        """The model runs."""
        for rank in self._ranks(ranks):
            self.writers[rank].record_work()

    def state(self, ranks: str, state: str) -> None:
        """Ranks are in this state of the script."""
        for rank in self._ranks(ranks):
            self.writers[rank].state = RankState[state]
            self.writers[rank].publish()

    def exited(self, ranks: str) -> None:
        """The processes of ranks have exited."""
        for rank in self._ranks(ranks):
            self.watch.rank_exited(rank)

    def mismatch(self) -> None:
        """Both ranks have reduced once; then one reduces and the other gathers."""
        self.issue("0,1", "all_reduce", "completed")
        self.issue("0", "all_reduce")
        self.issue("1", "all_gather", line="91")

    def circle(self) -> None:
        """Each rank waits in a group in which the other has not arrived."""
        self.groups("1", "2")
        self.issue("0", "all_reduce", group="1")
        self.issue("1", "all_reduce", group="2")

    def hang(self, phase: str) -> None:
        """Rank 1 does nothing in a phase that it has never completed; rank 0 waits."""
        self.issue("0", "all_reduce")
        if phase in Phase.__members__:
            self.replace("1", phase)
        else:
            self.enter("1", phase)

    def judge(self) -> None:
        """In the first step, rank 1 waits for a server in its second reward function, the first one has
        returned at once, and rank 0 waits.
        """
        self.connected("1")
        self.issue("0", "all_reduce")
        self.enter("1", "score")
        for _ in range(2):
            self.enter("1", "reward")
            self.leave("1", "reward")
        self.enter("1", "reward")

    # what processes show

    def groups(self, *names: str) -> None:
        """Flight Recorders name the members of these groups."""
        self.group_members = {name: {"ranks": "[0, 1]"} for name in names}

    def silent(self, ranks: str, why: str = "", recorder: str = "gloo", late: str = "") -> None:
        """Recorders of these ranks do not answer; without a reason they do again.

        Args:
            late: the reason is that the answer has not come yet.
        """
        reason = collective_records.NoAnswer(why) if late else why
        self.failures[recorder] = dict.fromkeys(self._ranks(ranks), reason) if why else {}

    def garble(self, rank: str) -> None:
        """The last entry of a rank has no number."""
        self.entries[int(rank)][-1]["collective_seq_id"] = "many"

    def nccl(self) -> None:
        """What the ranks have issued was NCCL's: the other recorder holds only a vote of grpo-run."""
        vote = {
            "process_group": ["grpo_run/votes", ""], "pg_id": 9, "collective_seq_id": 1,
            "profiling_name": "gloo:all_reduce", "retired": True, "time_created_ns": 0,
        }  # fmt: skip
        self.nccl_entries = {
            rank: [
                entry
                | {"profiling_name": entry["profiling_name"].replace("gloo", "nccl"), "time_created_ns": 1}
                for entry in entries
            ]
            for rank, entries in self.entries.items()
        }
        self.entries = {rank: [vote] for rank in self.entries}

    def process(self, ranks: str, state: str) -> None:
        """The state of main threads: R, S, D, T, t, or `?` if it cannot be read."""
        for rank in self._ranks(ranks):
            self.states[rank] = None if state == "?" else state

    def frozen(self, ranks: str = "") -> None:
        """Interpreters that do not run."""
        self.frozen_ranks = set(self._ranks(ranks))

    def connected(self, ranks: str = "") -> None:
        """Ranks with a connection to outside; `?` if the kernel does not tell."""
        self.connected_ranks = None if ranks == "?" else set(self._ranks(ranks))

    def unreadable(self, ranks: str = "") -> None:
        """Ranks whose slots cannot be read."""
        self.unreadable_ranks = set(self._ranks(ranks))

    def no_io(self, ranks: str) -> None:
        """Ranks whose bytes cannot be read."""
        self.io |= dict.fromkeys(self._ranks(ranks))

    def active(self, ranks: str = "") -> None:
        """Ranks with a thread that may issue collectives."""
        self.active_threads = set(self._ranks(ranks))

    def thread(self, ranks: str, name: str, state: str = "") -> None:
        """Another thread of ranks; `unreadable` if threads may not be read."""
        for rank in self._ranks(ranks):
            self.other_threads[rank] = (
                None if name == "unreadable" else {rank + 300: ThreadReading(state, 1.0, name)}
            )

    def waits(self, ranks: str, *waits: str, moved: str = "") -> None:
        """What the threads of ranks wait for, the main thread's first: `futex`, `timed`, or `sleep:SECONDS`.

        Args:
            moved: they have run since the last look.
        """
        for rank in self._ranks(ranks):
            self.thread_waits[rank] = [self._wait(word) for word in waits]
            self.switches[rank] += bool(moved)

    def refuse(self, rank: str) -> None:
        """The kernel does not show what the threads of a rank wait for."""
        self.refused[int(rank)] = "may not be read"

    def truncate(self) -> None:
        """The file of the board loses its end."""
        os.truncate(self.path, 4096)

    def learned(self, **durations: str) -> None:
        """What phases have shown in earlier attempts."""
        self.watch.phase_durations.earlier_attempts = {
            key_of(name): found for name, text in durations.items() if (found := durations_of(text))
        }

    def next_attempt(self, attempt: str) -> None:
        """Begin an attempt with what the run has learned."""
        self.watch.phase_durations.earlier_attempts = self.watch.phase_durations.merged()
        self.begin(attempt)

    def gap(self, seconds: str) -> None:
        """Nobody scans for this long."""
        self.now += float(seconds)

    def outlasted(self) -> str:
        """Whether a stop waits for a rank in vain."""
        return str(self.watch.outlasted(self._slots()))

    # scans and what they find

    def scan(self) -> str:
        """One scan; running interpreters have just stamped their heartbeat."""
        return self._say(self._scan())

    def passes(self, seconds: str, *doing: str, every: str = "0.1") -> str:
        """Scan for this long, up to the first finding.

        Args:
            doing: before each scan: `cpu:RANK:SECONDS`, `io:RANK:BYTES`, `work:RANK`, `publish:RANK`,
                `gather` (all ranks, to the end), `run:RANK` (its threads are scheduled), `entry` (recorders
                get another one), `flicker:STATE` (main threads are in it at every second poll), `fast:STATE`
                (at every second scan). A word may end in `/N`: only before every Nth scan.
            every: seconds between scans.
        """
        until, number = self.now + float(seconds), 0
        while self.now < until - 1e-9:
            self.now += float(every)
            for word in doing:
                what, _, each = word.partition("/")
                if number % int(each or 1) == 0:
                    self._do(*what.split(":"), number=number)
            number += 1
            found = self._scan()
            if found is not None:
                return self._say(found)
        return "nothing"

    def ends(self, seconds: str, *doing: str) -> str:
        """Scan for this long; return only what kind of finding there is."""
        return self.passes(seconds, *doing).partition(" at ")[0]

    def stalls(self, seconds: str, *doing: str) -> str:
        """Scan for this long, every half second; return the stall that there is, without cause and times."""
        found = self.passes(seconds, *doing, every="0.5").splitlines()[0]
        return found.partition(" by ")[2] or found

    def make(self, what: str) -> None:
        """Another command, with its words after colons."""
        verb, *words = what.split(":")
        getattr(self, verb)(*words)

    def until(self, what: str) -> str:
        """Scan until a rank is `suspected`, or records are `polled`."""
        while not (self.watch.suspicion if what == "suspected" else self.polled):
            self.now += 0.1
            found = self._scan()
            if found is not None:
                return self._say(found)
        return self.when()

    def scan_when_due(self) -> str:
        """Scan every 0.2 s, or when the detector asks for it, up to the first finding."""
        for number in range(10):
            self.now = min(self.now + 0.2, max(self.now, self.watch.due_at))
            found = self._scan()
            if found is not None:
                return f"{self._say(found)}\nafter {number + 1} scans"
        return "nothing"

    def when(self) -> str:
        """The time."""
        return f"{self.now - START:.1f} s"

    def due(self) -> str:
        """When the detector asks for the next scan, in seconds from now."""
        return f"{self.watch.due_at - self.now:.1f} s"

    def suspicion(self) -> str:
        """What is suspected."""
        return self.watch.suspicion or "nothing"

    def blind(self) -> str:
        """What cannot be observed."""
        return "\n".join(f"{rank}: {why}" for rank, why in sorted(self.watch.blind.items())) or "nothing"

    def blind_ranks(self, ranks: str = "") -> str:
        """Why something cannot be observed of these ranks; fails if it is of others."""
        assert sorted(self.watch.blind) == self._ranks(ranks)
        return "; ".join(sorted(set(self.watch.blind.values()))) or "nothing"

    def polls(self, least: str = "", most: str = "") -> str:
        """How often records were read, and when first; whether that is in these bounds, if they are given."""
        if least:
            return str(int(least) <= len(self.polled) <= float(most or math.inf))
        first = f", first at {self.polled[0] - START:.1f} s" if self.polled else ""
        return f"{len(self.polled)}{first}"

    def intervals(self) -> str:
        """Whether the intervals between polls only grow, and the last one."""
        gaps = [round(two - one, 1) for one, two in zip(self.polled, self.polled[1:], strict=False)]
        return f"{gaps == sorted(gaps)}, {gaps[-1]} s"

    def asked(self, recorder: str = "threads") -> str:
        """Which ranks were asked for their threads, or for NCCL's records, and how often; more than nine
        times is `often`.
        """
        counts = Counter(
            ",".join(map(str, sorted(ranks)))
            for ranks in (self.threads_asked if recorder == "threads" else self.nccl_asked)
        )
        said = (f"{ranks or 'nobody'} {times if times < 10 else 'often'}" for ranks, times in counts.items())
        return "; ".join(said) or "nobody"

    def looks(self, most: str = "", least: str = "0") -> str:
        """At whose threads the detector has looked; whether that is in these bounds, if they are given."""
        if most:
            return str(int(least) <= len(self.looked) <= int(most))
        return " ".join(str(ranks) for _, ranks in self.looked) or "none"

    def awaited(self) -> str:
        """The rank that others wait for."""
        found = self.watch.awaited
        if found is None:
            return "nobody"
        where = "its exit" if found.exiting else found.phase.name
        return (
            f"rank {found.rank} in {where} since {found.since_seconds - START:.0f} s, until"
            f" {found.deadline_at_seconds - START:.0f} s, busy {found.busy}, waiting {found.waiters}"
            f"{', outside ' + found.outside if found.outside else ''}{', unknown' * found.unknown_wait}"
            f"{', unusual at ' + found.place if found.unusual else ''}"
        )

    def evidence(self) -> str:
        """The recorders whose answers are kept, by rank."""
        return str(
            {
                rank: " ".join(name for name in ("gloo", "nccl") if f"{name}:".encode() in text)
                for rank, text in self.watch.recordings.items()
            }
        )

    def logs(self) -> str:
        """The last entry of each rank's log, as it is written to a file."""
        logs = json.loads(json.dumps(self.watch.collective_logs()))
        return "\n".join(f"{rank}: {log[-1] if log else 'empty'}" for rank, log in logs.items()) or "none"

    def positions(self, exited: str = "") -> str:
        """Where ranks are, of which some have exited."""
        gone = set(self._ranks(exited))
        found = self.watch.positions(self._slots(), {rank: rank in gone for rank in range(self.board.slots)})
        return "\n".join(
            f"{rank}: {'exited, ' * one.exited}"
            + (
                "unknown"
                if one.records is None
                else " ".join(f"{record.operation} #{record.sequence}" for record in one.records)
            )
            for rank, one in found.items()
        )

    def durations(self, phase: str) -> str:
        """What the run has learned of a phase, and whether that is the same when it is asked again."""
        found, again = (self.watch.phase_durations.merged().get(key_of(phase)) for _ in range(2))
        assert found == again
        if found is None:
            return "nothing"
        return (
            f"first {found.first_seconds:g} s, {found.count} later up to {found.max_seconds:g} s,"
            f" ended after {found.ended_seconds:.0f} s"
        )

    def by_rank(self) -> str:
        """The phases that each rank has completed in this attempt."""
        return str(
            {
                rank: sorted(str(getattr(key, "name", key)) for key in phases)
                for rank, phases in self.watch.phase_durations.by_rank().items()
            }
        )

    # the rest is what the detector reads

    def _ranks(self, text: str) -> list[int]:
        if text == "all":
            return list(range(self.board.slots))
        return [int(rank) for rank in text.split(",") if rank]

    def _wait(self, word: str) -> Wait:
        if word.startswith("sleep:"):
            until = START + float(word[6:])
            return Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=until)
        timed = word == "timed"
        return Wait(
            kind=WaitKind.timed if timed else WaitKind[word], call="futex",
            timeout_seconds=math.nan if timed else math.inf,
        )  # fmt: skip

    def _do(self, what: str, rank: str = "all", amount: str = "0", *, number: int) -> None:
        if what in ("flicker", "fast"):
            odd = (number if what == "fast" else len(self.polled)) % 2
            self.states = dict.fromkeys(self.states, rank if odd else "S")
            return
        for one in self._ranks(rank):
            if what == "cpu":
                self.cpu[one] += float(amount)
            elif what == "io":
                self.io[one] = (self.io[one] or 0) + int(amount)
            elif what == "work":
                self.writers[one].record_work()
            elif what == "publish":
                self.writers[one].publish()
            elif what == "run":
                self.switches[one] += 1
            elif what == "gather":
                self.issue(str(one), "all_gather")
                self.complete(str(one))
            elif what == "entry":
                other = {"collective_seq_id": 1, "process_group": ["2", ""], "pg_id": 2}
                self.entries[one].insert(0, {**self.entries[one][0], **other})

    def _slots(self) -> dict[int, Slot | None]:
        whole = self.board.has_full_size
        return {
            rank: self.board.read(rank) if whole and rank not in self.unreadable_ranks else None
            for rank in range(self.board.slots)
        }

    def _scan(self) -> HangFinding | None:
        if self.board.has_full_size:
            for rank, writer in enumerate(self.writers):
                if rank not in self.frozen_ranks:
                    writer.heartbeat()
        return self.watch.scan(self._slots())

    def _say(self, found: HangFinding | None) -> str:
        if found is None:
            return "nothing"
        times = f"at {self.when()}, began at {found.began_at_seconds - START:.1f} s"
        if found.deadlock is not None:
            one = found.deadlock
            lines = " ".join(f"{rank}:{place.line}" for rank, place in one.locations.items())
            return f"deadlock {times}: {one.cause} by {one.culprits}, waiting {one.waiters}, lines {lines}"
        stall = found.stall
        assert stall is not None
        lasts = f", lasts {stall.lasts_seconds:.0f} s" * bool(stall.lasts_seconds)
        return (
            f"{stall.confidence} stall {times}: {stall.cause} by {stall.culprits}, waiting {stall.waiters},"
            f" in {stall.callback or stall.phase.name}, deadline {stall.deadline_seconds:g} s{lasts}"
            f"{', uninterruptible' * stall.uninterruptible}\n{stall.sentence}"
        )

    def _fetch(
        self,
        sockets: dict[int, str],
        seconds: float,
        handler: str = collective_records.FLIGHT_RECORDER_HANDLER,
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        failures = {rank: why for rank, why in self.failures["gloo"].items() if rank in sockets}
        if handler == THREADS_HANDLER:
            self.threads_asked.append(set(sockets))
            failures |= {rank: "no answer" for rank in sockets if rank in self.frozen_ranks}
            return {rank: self._threads(rank) for rank in sockets if rank not in failures}, failures
        entries = self.entries
        if handler == collective_records.NCCL_RECORDER_HANDLER:
            self.nccl_asked.append(set(sockets))
            if self.nccl_entries is None:
                return {}, dict.fromkeys(sockets, "answered b'HTTP/1.1 404 Not Found'")
            entries, failures = self.nccl_entries, dict(self.failures["nccl"])
        else:
            self.polled.append(self.now)
        answers = {
            rank: json.dumps({"entries": entries[rank], "pg_config": self.group_members}).encode()
            for rank in sockets
            if rank not in failures
        }
        return answers, failures

    def _threads(self, rank: int) -> bytes:
        log = self.board.collective_log(rank)
        waiting = {entry.thread for entry in log if entry.progress is CollectiveProgress.waiting}
        slot = self.board.read(rank)
        backward = slot is not None and slot.phase is Phase.forward_backward and not waiting
        report = ThreadReport(
            waiting=dict.fromkeys(waiting, self.switches[rank]), passive={},
            active=("Thread-1 at serve.py:12 serve",) if rank in self.active_threads else (),
            in_backward=7 if backward else None, issued={}, uses_futures=False, at=f"train.py:{rank} in main",
        )  # fmt: skip
        return report.model_dump_json().encode()

    def _remaining(self, pids: Mapping[int, int], *, connections: bool) -> ExitFacts | None:
        usages = {}
        for rank, pid in pids.items():
            transferred = self.io[rank]
            if transferred is None:
                return None
            usages[pid, 0] = ProcessUsage(cpu_seconds=self.cpu[rank], io_bytes=transferred)
        return ExitFacts(
            states={rank: self.states[rank] or "S" for rank in pids},
            own=usages,
            waits_for=("another machine",) if self.connected_ranks else (),
        )

    def _main_thread(self, pid: int) -> processes.ProcessStat | None:
        state = self.states[pid - 100]
        return None if state is None else replace(MAIN_THREAD, state=state, cpu_seconds=self.cpu[pid - 100])

    def _tree_usage(self, members: list[int]) -> TreeReading | None:
        told = [io_bytes for pid in members if (io_bytes := self.io[pid - 100]) is not None]
        if len(told) < len(members):
            return None
        cpu_seconds = sum(self.cpu[pid - 100] for pid in members)
        return TreeReading(members=frozenset(members), cpu_seconds=cpu_seconds, io_bytes=sum(told))

    def _tree_threads(self, members: list[int]) -> dict[int, ThreadReading] | None:
        threads = {
            pid: ThreadReading(self.states[pid - 100] or "S", self.cpu[pid - 100], "python")
            for pid in members
        }
        for pid in members:
            others = self.other_threads.get(pid - 100, {})
            if others is None:
                return None
            threads |= others
        if self.busy_threads:
            threads |= {pid + 100: ThreadReading("R", 0.0, "worker") for pid in members}
        return threads

    def _connections(
        self, members: dict[int, list[int]], supervisor: list[int]
    ) -> dict[int, Connections | None]:
        connected = self.connected_ranks
        if connected is None:
            return dict.fromkeys(members)
        return {
            rank: Connections(outside="10.0.0.5:8000" if rank in connected else "", traffic_bytes=0)
            for rank in members
        }


class _Looks:
    """What `LookReader` would read of the threads of ranks."""

    def __init__(self, shell: DetectorShell) -> None:
        self.shell = shell

    @property
    def refused(self) -> dict[int, str]:
        """The refusals of the kernel, by rank."""
        return self.shell.refused

    def forget(self) -> None:
        """Nothing is kept."""

    def main_thread_may_be_stuck(self, pid: int) -> bool:
        """Whether the main thread waits without a time limit."""
        waits = self.shell.thread_waits.get(pid - 100, ())
        return bool(waits) and waits[0].kind in (WaitKind.futex, WaitKind.child, WaitKind.sleep)

    def read(self, pids: Mapping[int, int], idle: Mapping[int, Collection[int]]) -> dict[int, RankLook]:
        """Each rank has one process."""
        shell = self.shell
        shell.looked.append((shell.now, tuple(pids)))
        return {
            rank: RankLook(
                pid=pid,
                processes={
                    pid: Process(
                        pid=pid,
                        parent=1,
                        threads=tuple(
                            WaitingThread(
                                tid=pid + 1000 * number, name="python",
                                state="T" if wait.kind is WaitKind.stopped else shell.states[rank] or "S",
                                switches=shell.switches[rank], wait=wait,
                            )
                            for number, wait in enumerate(shell.thread_waits[rank])
                        ),
                    )
                },
                idle_threads=frozenset(idle[rank]),
            )
            for rank, pid in pids.items()
        }  # fmt: skip
