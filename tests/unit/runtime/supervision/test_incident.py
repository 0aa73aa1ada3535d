"""Incident investigation: the order of its steps, and that errors never prevent a recovery."""

from __future__ import annotations

import dataclasses
import json
import signal
import stat
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.detection.finding import Finding
from grpo_run.runtime.record.attempt_files import AttemptFiles
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.supervision import incident
from grpo_run.runtime.supervision.attempts.attempt import Attempt
from grpo_run.runtime.supervision.attempts.exits import Exits
from grpo_run.runtime.supervision.incident import (
    JOURNAL_TAIL_LINES,
    IncidentContext,
    investigate,
    journal_tail,
)
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CONSENSUS_GROUP, Collective, CollectiveProgress
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.evidence.collection import Evidence
from grpo_run.watchdog.observation import Exit, Phase, RankError
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase
from grpo_run.watchdog.out_of_memory.retries import Retries
from grpo_run.watchdog.stalls.stall import Stall

PEER_GONE = "Connection closed by peer [127.0.0.1]:4711"


def record(operation: str) -> Collective:
    """The third collective of the default group."""
    return Collective(
        group="0",
        sequence=3,
        operation=operation,
        sizes=((3,),),
        dtypes=("Float",),
        progress=CollectiveProgress.waiting,
    )


def exited(rank: int, **changes: Any) -> Exit:
    """A rank that exited with code 1."""
    fields: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "exit_code": 1, "signal": None, "order": rank}
    return Exit(**(fields | changes))


def victim(rank: int) -> Exit:
    """A rank that lost its connection."""
    error = RankError(type="RuntimeError", message=PEER_GONE, traceback="", location=None, wall_time=1.0)
    return exited(rank, error=error)


class FakeExits(Exits):
    """Given exits; a wait adds those of the scene."""

    def __init__(self, scene: Scene, seen: Sequence[Exit]) -> None:
        super().__init__(AttemptFiles(scene.run, 0), lambda rank, text: None)
        self.seen = list(seen)
        self._scene = scene

    def wait(self, ranks: Any, seconds: float, slots: Any) -> None:
        self._scene.done.append("exits")
        self.seen += self._scene.further


class Scene:
    """A run directory, a detector with fixed answers, and the order in which things were done."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = RunDirectory(path=path)
        self.run.create()
        self.done: list[str] = []
        self.asked: dict[str, Any] = {}
        self.records = {0: record("all_reduce"), 1: record("all_reduce")}
        self.further: list[Exit] = []
        self.watch = SimpleNamespace(
            positions=self._positions, collective_logs=lambda: {0: [], 1: []}, recordings={0: b"{}"}, blind={}
        )
        monkeypatch.setattr(incident.collection, "collect", self._collect)

    def investigate(self, *exits: Exit, **changes: Any) -> incident.IncidentOutcome:
        """Investigate the scene."""
        return investigate(self.run, self.context(*exits, **changes))

    def context(self, *exits: Exit, **changes: Any) -> IncidentContext:
        """The fault, with rank 0 at place 1 and rank 1 at place 0; ranks without an exit are alive."""
        gone = {exit.rank for exit in exits}
        attempt = Attempt(self.run, 0, warn=lambda rank, text: None, rank_of_place={1: 0, 0: 1}, world_size=2)
        attempt.exits = FakeExits(self, exits)
        fields: dict[str, Any] = {
            "attempt": attempt,
            "ranks": SimpleNamespace(alive={1 - r: 100 + r for r in (0, 1) if r not in gone}),
            "read_slots": lambda: {0: None, 1: None}, "detector": self.watch, "best_position": (1, 5),
        }  # fmt: skip
        return IncidentContext(**(fields | changes))

    def _positions(self, slots: Any, exited: dict[int, bool]) -> dict[int, Position]:
        self.done.append("positions")
        self.asked["exited"] = exited
        return {
            rank: Position(rank=rank, records=(self.records[rank],), exited=exited[rank]) for rank in (0, 1)
        }

    def _collect(self, folder: Path, pids: dict[int, int], files: Any, **options: Any) -> Evidence:
        self.done.append("evidence")
        self.asked.update(options, pids=pids, folder=folder)
        return Evidence(missing=["no py-spy"], stacks={}, complete_at=0.0)


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A run directory that can be written."""
    return Scene(tmp_path / "run", monkeypatch)


def stall(cause: Cause = Cause.reward_stall) -> Finding:
    """A finding that rank 1 hangs."""
    found = Stall(
        cause=cause, culprits=(1,), waiters=(0,), phase=Phase.reward, deadline_seconds=8.0, waited_seconds=9.0,
        sentence="Rank 1 hangs.",
    )  # fmt: skip
    return Finding(stall=found, began_at_seconds=0.0)


def verdict_on_disk(outcome: incident.IncidentOutcome) -> dict[str, Any]:
    """Return the content of verdict.json."""
    value: dict[str, Any] = json.loads((outcome.folder / "verdict.json").read_text())
    return value


def test_records_are_read_before_stacks_and_exits_after(scene: Scene) -> None:
    """The survivors of a broken collective exit within milliseconds."""
    scene.investigate(exited(1))
    assert scene.done == ["positions", "evidence", "exits"]
    assert scene.asked["exited"] == {0: False, 1: True}
    assert scene.asked["pids"] == {0: 100}


def test_a_finding_contains_its_records(scene: Scene) -> None:
    """They are not read again, and no exits are waited for."""
    scene.investigate(finding=stall())
    assert scene.done == ["evidence"]
    assert scene.asked["recordings"] == {0: b"{}"}


@pytest.mark.parametrize(("cause", "stuck"), [(Cause.reward_stall, []), (Cause.interpreter_stuck, [1])])
def test_native_frames_are_collected_only_of_stuck_interpreters(
    scene: Scene, cause: Cause, stuck: list[int]
) -> None:
    """They take seconds."""
    scene.investigate(finding=stall(cause))
    assert scene.asked["interpreter_stuck"] == stuck


def test_the_folder_is_named_after_the_cause(scene: Scene) -> None:
    """It contains verdict, timeline and missing evidence; only the owner can read it."""
    scene.watch.blind = {1: "its slot on the board cannot be read"}
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.folder.name == "0001-signal"
    assert outcome.missing == ["no py-spy", "rank 1: its slot on the board cannot be read"]
    assert verdict_on_disk(outcome)["missing_evidence"] == outcome.missing
    assert json.loads((outcome.folder / "timeline.json").read_text())["ranks"] == {}
    assert {stat.S_IMODE(file.stat().st_mode) for file in outcome.folder.iterdir()} == {0o600}


def test_the_last_lines_of_the_journal_are_evidence(scene: Scene) -> None:
    """Complete lines, up to a limit."""
    scene.run.journal.write_text("".join(f'{{"n": {number}}}\n' for number in range(JOURNAL_TAIL_LINES + 50)))
    scene.investigate(exited(1))
    assert len(scene.asked["events"]) == JOURNAL_TAIL_LINES
    assert scene.asked["events"][-1] == f'{{"n": {JOURNAL_TAIL_LINES + 49}}}\n'


def test_the_memory_that_each_rank_has_measured_is_evidence(scene: Scene) -> None:
    """By global rank, also of a rank that has exited; a rank that has measured nothing is left out."""
    board = Board.create(scene.run.board, 2)
    area = board.writer(0, rank=1, pid=1, attempt=0).memory_area
    area.figures(Phase.generate).peak_allocated_bytes = 9
    area.publish(Phase.generate)
    context = scene.context(exited(1))
    scene.investigate(exited(1), read_memory=lambda: context.attempt.read_memory(board))
    found = scene.asked["rank_memory"]
    assert list(found) == [1]
    assert found[1]["phases"]["generate"]["peak_allocated_bytes"] == 9


def test_the_tail_of_an_unreadable_journal_is_empty(tmp_path: Path) -> None:
    """The investigation continues."""
    assert journal_tail(tmp_path / "missing") == []


def test_only_the_end_of_a_large_journal_is_read(tmp_path: Path) -> None:
    """Journals grow to megabytes; invalid UTF-8 is replaced."""
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b"x" * 3_000_000 + b"\n\xff\n{}\n")
    lines = journal_tail(path)
    assert lines[-2:] == ["\ufffd\n", "{}\n"]
    assert sum(map(len, lines)) <= 256 * 1024


def test_a_folder_that_cannot_be_created_does_not_prevent_a_verdict(scene: Scene) -> None:
    """It is named in the missing evidence."""
    scene.run.incidents.rmdir()
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.verdict.cause is Cause.signal
    assert outcome.folder == scene.run.incidents
    assert "evidence could not be written" in outcome.missing[0]


def test_a_disk_that_becomes_full_is_named_in_the_missing_evidence(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later steps still happen, and the verdict is returned."""

    def full(*args: Any, **options: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(incident.collection, "collect", full)
    monkeypatch.setattr(incident.incident_files, "close_incident", full)
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.verdict.culprits == (1,)
    assert [text.partition(":")[0] for text in outcome.missing] == [
        "evidence could not be written",
        "the verdict could not be written",
    ]


def test_an_exit_during_the_investigation_counts(scene: Scene) -> None:
    """The victim was observed first; the killed rank is the culprit."""
    scene.further = [exited(1, exit_code=None, signal=signal.SIGKILL)]
    assert scene.investigate(victim(0)).verdict.culprits == (1,)


def test_mismatched_collectives_explain_lost_connections(scene: Scene) -> None:
    """Gloo aborted one side and closed the connections of the other."""
    scene.records[1] = record("all_gather")
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGABRT), victim(0))
    assert outcome.verdict.cause is Cause.collective_mismatch
    assert outcome.folder.name == "0001-collective_mismatch"


def test_a_rank_that_exits_before_it_answers_is_judged_by_its_collective_log(scene: Scene) -> None:
    """The other rank aborted, which broke its connection."""
    scene.records[1] = record("all_gather")
    ranks = SimpleNamespace(alive={1: 100})  # rank 0, at place 1

    def positions(slots: Any, exited: dict[int, bool]) -> dict[int, Position]:
        found = scene._positions(slots, exited)
        if not exited[0]:
            found[0] = Position(rank=0, records=None, exited=False)
            ranks.alive = {}  # it has exited by the time its exit is waited for
        return found

    scene.watch.positions = positions
    scene.further = [victim(0)]
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGABRT), ranks=ranks)
    assert outcome.verdict.cause is Cause.collective_mismatch
    assert scene.done == ["positions", "evidence", "exits", "positions"]


def test_mismatched_collectives_do_not_explain_a_kill(scene: Scene) -> None:
    """A SIGKILL has its own cause."""
    scene.records[1] = record("all_gather")
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL), victim(0))
    assert outcome.verdict.cause is Cause.signal


def test_an_abort_with_matching_collectives_is_a_signal(scene: Scene) -> None:
    """An exited rank does not prove why it exited."""
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGABRT), victim(0))
    assert (outcome.verdict.cause, outcome.verdict.culprits) == (Cause.signal, (1,))


def test_a_rank_that_completed_early_is_the_culprit_of_lost_connections(scene: Scene) -> None:
    """It exited with code 0, and only the rank that still needed it failed."""
    outcome = scene.investigate(exited(1, exit_code=0, completed=True), victim(0))
    assert (outcome.verdict.cause, outcome.verdict.culprits) == (Cause.rank_exited_early, (1,))


def test_a_rank_that_completed_is_not_the_culprit_of_an_exception(scene: Scene) -> None:
    """The exception of another rank is the cause."""
    error = RankError(type="KeyError", message="x", traceback="", location=None, wall_time=1.0)
    outcome = scene.investigate(exited(1, exit_code=0, completed=True), exited(0, error=error))
    assert outcome.verdict.culprits == (0,)


def test_a_proved_deadlock_is_the_verdict(scene: Scene) -> None:
    """It was found before any rank exited."""
    deadlock = Deadlock(
        cause=Cause.collective_missing_rank, culprits=(0,), waiters=(1,), at={}, locations={}, mismatch=None,
        sentence="Deadlocked.",
    )  # fmt: skip
    outcome = scene.investigate(finding=Finding(deadlock=deadlock, began_at_seconds=0.0))
    assert (outcome.verdict.cause, outcome.verdict.confidence) == (Cause.collective_missing_rank, "proved")


@pytest.mark.parametrize("group", [CONSENSUS_GROUP, "0"])
def test_a_rank_in_a_consensus_call_is_told_and_the_other_ones_log_says_it(scene: Scene, group: str) -> None:
    """The first raises it; the other sits in torch. Nothing is said where no rank is in a consensus call."""
    at = {0: dataclasses.replace(record("all_gather"), group=group), 1: record("barrier")}
    deadlock = Deadlock(
        cause=Cause.collective_missing_rank, culprits=(1,), waiters=(0,), at=at, locations={}, mismatch=None,
        sentence="Deadlocked.",
    )  # fmt: skip
    finding = Finding(deadlock=deadlock, began_at_seconds=0.0)
    told: list[str] = []
    context = scene.context(finding=finding, publish_disagreement=told.append)
    assert context.attempt.files.make() is None
    incident.tell_ranks(context, investigate(scene.run, context).verdict)
    logs = {rank: context.attempt.files.log(rank) for rank in (0, 1)}
    assert not logs[0].exists()
    if group == CONSENSUS_GROUP:
        assert told == ["Deadlocked."]
        assert logs[1].read_text() == "Ended by grpo-run: Deadlocked.\n"
    else:
        assert told == []
        assert not logs[1].exists()


def test_a_slow_stop_has_no_culprit(scene: Scene) -> None:
    """No rank failed and no hang was found."""
    outcome = scene.investigate(stop_seconds=30.0)
    assert (outcome.verdict.culprits, outcome.verdict.cause) == ((), Cause.unknown)
    assert "30 s" in outcome.verdict.sentence


def test_incidents_are_numbered(scene: Scene) -> None:
    """A new incident does not overwrite an earlier one."""
    names = [scene.investigate(exited(1)).folder.name[:4] for _ in range(3)]
    assert names == ["0001", "0002", "0003"]


class UnexpectedError(Exception):
    """An error that no code expects."""


def test_any_error_while_collecting_evidence_does_not_prevent_a_verdict(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The type of the error is named."""

    def fail(*args: Any, **options: Any) -> Any:
        raise UnexpectedError("odd")

    monkeypatch.setattr(incident.collection, "collect", fail)
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.verdict.culprits == (1,)
    assert "evidence could not be written: UnexpectedError: odd" in outcome.missing


@pytest.mark.parametrize("evidence_fails", [False, True])
def test_records_that_cannot_be_read_are_named_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, evidence_fails: bool
) -> None:
    """Whether or not later steps fail; the verdict is made without them."""

    def fail(*args: Any, **options: Any) -> Any:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(scene.watch, "positions", fail)
    if evidence_fails:
        monkeypatch.setattr(incident.collection, "collect", fail)
    outcome = scene.investigate(exited(1, exit_code=None, signal=signal.SIGKILL))
    assert outcome.verdict.cause is Cause.signal
    told = [line for line in outcome.missing if line.startswith("collective records could not be read")]
    assert told == ["collective records could not be read: [Errno 24] Too many open files"]


OUT_OF_MEMORY = {
    "type": "OutOfMemoryError", "message": "CUDA out of memory. Tried to allocate 2.00 GiB.", "traceback": "",
    "location": None, "wall_time": 2.0, "phases": ["generate"],
    "chain": [{"types": ["torch.OutOfMemoryError"], "message": "CUDA out of memory. Tried to allocate 2.00 GiB."}],
}  # fmt: skip


def write_error_of(context: IncidentContext, rank: int, value: dict[str, Any]) -> None:
    """A rank has written its error, and has not exited yet."""
    context.attempt.files.make()
    context.attempt.files.error(rank).write_text(json.dumps(value))


@pytest.mark.parametrize("aborted", [True, False])
def test_a_rank_without_memory_is_named_although_its_peers_have_exited_first(
    scene: Scene, aborted: bool
) -> None:
    """It still runs its exit handlers; the peer lost its connection, or was aborted by NCCL's watchdog."""
    peer = exited(0, exit_code=None, signal=signal.SIGABRT) if aborted else victim(0)
    context = scene.context(peer)
    write_error_of(context, 1, OUT_OF_MEMORY)
    verdict = investigate(scene.run, context).verdict
    assert (verdict.cause, verdict.culprit, verdict.phase) == (Cause.gpu_oom, 1, "generate")


def test_a_rank_that_raised_is_named_although_its_peer_has_exited_first(scene: Scene) -> None:
    """Otherwise the fault would seem to be on another node."""
    context = scene.context(victim(0))
    write_error_of(context, 1, OUT_OF_MEMORY | {"type": "ValueError", "message": "bad", "chain": []})
    verdict = investigate(scene.run, context).verdict
    assert (verdict.cause, verdict.culprit) == (Cause.startup_failure, 1)


def test_a_rank_that_exits_with_a_code_is_not_named_before_its_exit_is_seen(scene: Scene) -> None:
    """`sys.exit(0)` writes an error, too."""
    context = scene.context(victim(0))
    write_error_of(context, 1, OUT_OF_MEMORY | {"type": "SystemExit", "message": "0", "chain": []})
    assert investigate(scene.run, context).verdict.cause is Cause.unknown


def test_ranks_that_wait_for_a_rank_without_memory_do_not_hang(scene: Scene) -> None:
    """They are found to wait while it still ends."""
    context = scene.context(finding=stall())
    write_error_of(context, 0, OUT_OF_MEMORY)
    verdict = investigate(scene.run, context).verdict
    assert (verdict.cause, verdict.culprit) == (Cause.gpu_oom, 0)


def test_a_rank_whose_allocator_thrashes_is_out_of_memory(scene: Scene) -> None:
    """With evidence, as for a hang."""
    retries = Retries(rank=1, phase=MemoryPhase.backward, step=30, commits=10, count=40, slowdown=3.5)
    outcome = scene.investigate(finding=Finding(retries=retries, began_at_seconds=0.0))
    assert scene.done == ["evidence"]
    assert outcome.folder.name == "0001-gpu_oom"
    assert (outcome.verdict.culprit, outcome.verdict.step) == (1, 30)
