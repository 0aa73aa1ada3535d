"""The supervisor's decisions, with a real board and journal and fake processes."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.detection import exit_hangs
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.launch.config import Budget, RunConfig
from grpo_run.runtime.launch.injections.parsing import parse_injection
from grpo_run.runtime.processes.agent import Directive, RankStart
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import Journal, read_journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import read_status
from grpo_run.runtime.supervision import incident
from grpo_run.runtime.supervision.lifecycle import RunState
from grpo_run.runtime.supervision.supervisor import Supervisor
from grpo_run.watchdog.evidence import collection
from grpo_run.watchdog.observation import Exit, Phase, RankState
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts


class FakeRanks:
    """The processes of two ranks, as far as the supervisor observes them."""

    def __init__(self) -> None:
        self.pids = {0: 900, 1: 901}
        self.alive = dict(self.pids)
        self.later: list[Exit] = []
        self.signals = 0
        self._seen = 0

    def exit(self, rank: int, *, code: int | None = None, signal: int | None = None) -> Exit:
        """Make one exit."""
        del self.alive[rank]
        self._seen += 1
        return Exit(rank=rank, pid=900 + rank, exit_code=code, signal=signal, order=self._seen - 1)

    def request_exit(self) -> None:
        """Count the signals."""
        self.signals += 1

    def wait(self, timeout_seconds: float) -> list[Exit]:
        """Return the exits that happen during an investigation; none afterwards."""
        later, self.later = self.later, []
        return later


class SupervisedRun:
    """A supervisor, its ranks, and the messages it shows."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.directory = RunDirectory(path=path)
        self.directory.create()
        self.directory.write_run({"run_id": "run-1"})
        fields: dict[str, Any] = {
            "run_id": "run-1", "run_directory": path, "target": "train.py", "module": False, "arguments": (),
            "command": ("train.py",), "environment": {},
        }  # fmt: skip
        self.messages: list[str] = []
        self.supervisor = Supervisor(
            RunConfig(**(fields | changes)),
            self.directory,
            local_world_size=2,
            rank_environment=lambda supervisor, rank, world_size: {},
            notify=self.messages.append,
            observe_exit=lambda pids, connections: self.remaining,
        )
        self.remaining: ExitFacts | None = None
        self.supervisor.begin()
        self.ranks = FakeRanks()
        self.starts: Mapping[int, RankStart] = {}
        self.slots: dict[int, SlotWriter] = {}

    def attempt(self, *, world_size: int = 2) -> None:
        """Start an attempt as the agent does."""
        self.ranks = FakeRanks()
        workers = [
            SimpleNamespace(local_rank=rank, global_rank=rank, world_size=world_size) for rank in (0, 1)
        ]
        self.starts = self.supervisor.attempt_starting(workers, 0)
        self.supervisor.attempt_started(cast(RankGroup, self.ranks))
        self.slots = {
            rank: self.supervisor.board.writer(
                rank, rank=rank, pid=900 + rank, attempt=self.supervisor.attempt.number
            )
            for rank in (0, 1)
        }

    def train(self, *, step: int = 0, call: int = 1) -> None:
        """Both ranks enter a `train()` call."""
        for slot in self.slots.values():
            slot.state = RankState.training
            slot.train_call = call
            slot.step = slot.voted_step = slot.committed_step = slot.resumed_step = step
            slot.target_steps = 100
            slot.replace(Phase.data)
            slot.publish()

    def vote(self, step: int, ranks: Sequence[int] = (0, 1)) -> None:
        """These ranks have completed a step."""
        for rank in ranks:
            self.slots[rank].step = self.slots[rank].voted_step = step
            self.slots[rank].voted_at_ns = time.monotonic_ns()
            self.slots[rank].publish()

    def done(self, *ranks: int) -> None:
        """These ranks' scripts have completed."""
        for rank in ranks:
            self.slots[rank].state = RankState.done
            self.slots[rank].publish()

    def raised(self, rank: int, **changes: Any) -> None:
        """The bootstrap of a rank has written an exception."""
        record = {
            "type": "KeyError", "message": "'reward'", "traceback": "Traceback ...", "wall_time": time.time(),
            "location": ["train.py", 3, "reward"],
        }  # fmt: skip
        self.supervisor.attempt.files.error(rank).write_text(json.dumps(record | changes))

    def poll(self, *exits: Exit) -> Directive:
        """Poll once."""
        return self.supervisor.poll(cast(RankGroup, self.ranks), exits)

    def events(self, name: str) -> list[dict[str, Any]]:
        """Return the events of one kind in the journal."""
        return [record for record in read_journal(self.directory.journal) if record["event"] == name]

    @property
    def state(self) -> RunState:
        """The state of the lifecycle."""
        return self.supervisor.lifecycle.state


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """The pids alive at each collection of evidence; no signal is sent."""
    calls: list[dict[int, int]] = []

    def collect(
        incident: Path, pids: dict[int, int], stacks: dict[int, Path], **more: Any
    ) -> collection.Evidence:
        calls.append(dict(pids))
        return collection.Evidence(
            missing=["rank 0: no stack within 0.15 s"], stacks={}, complete_at=time.monotonic()
        )

    monkeypatch.setattr(collection, "collect", collect)
    monkeypatch.setattr(incident, "GATHER_SECONDS", 0.001)
    return calls


@pytest.fixture
def start(tmp_path: Path, collected: list[dict[int, int]]) -> Callable[..., SupervisedRun]:
    """Start a run whose first attempt trains."""

    def make(**changes: Any) -> SupervisedRun:
        run = SupervisedRun(tmp_path / "run", **changes)
        run.attempt()
        run.train()
        return run

    return make


def test_a_step_is_committed_when_every_rank_has_voted(start: Callable[..., SupervisedRun]) -> None:
    """It is committed once, and not before the last vote."""
    run = start()
    run.vote(1, ranks=[0])
    assert run.poll() is Directive.monitor
    assert run.events("step_committed") == []
    run.vote(1, ranks=[1])
    run.poll()
    run.poll()
    assert [(record["step"], record["target_steps"]) for record in run.events("step_committed")] == [(1, 100)]
    assert run.state is RunState.running


def test_a_step_waits_for_the_vote_of_other_nodes(start: Callable[..., SupervisedRun]) -> None:
    """The board does not show their ranks; only the result of the vote commits the step."""
    run = start()
    run.attempt(world_size=4)
    run.train()
    run.vote(1)
    run.poll()
    assert run.events("step_committed") == []
    run.slots[0].committed_step = 1
    run.slots[0].publish()
    run.poll()
    assert [record["step"] for record in run.events("step_committed")] == [1]


def test_the_step_resumed_from_is_not_committed_again(start: Callable[..., SupervisedRun]) -> None:
    """The last attempt committed it."""
    run = start()
    run.train(step=5)
    run.poll()
    assert run.events("step_committed") == []


def test_an_unreadable_slot_prevents_a_commit(start: Callable[..., SupervisedRun]) -> None:
    """Its rank may not have voted."""
    run = start()
    run.vote(1)
    run.supervisor.board.begin_attempt(0)
    run.poll()
    assert run.events("step_committed") == []


def test_a_killed_rank_is_recovered_after_evidence_is_written(
    start: Callable[..., SupervisedRun], collected: list[dict[int, int]]
) -> None:
    """Fault, evidence of the ranks alive, verdict, decision, restart: the journal has this order."""
    run = start()
    run.vote(7)
    run.poll()
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.restart
    assert collected == [{0: 900}]
    assert run.state is RunState.recovering
    names = [record["event"] for record in read_journal(run.directory.journal)]
    assert [name for name in names if name in ("incident", "action", "attempt_ended")] == [
        "incident", "action", "attempt_ended",
    ]  # fmt: skip
    (record,) = run.events("incident")
    assert (record["cause"], record["culprit"], record["step"]) == ("signal", 1, 7)
    assert run.events("action")[0]["action"] == "restart"
    verdict = json.loads((Path(record["incident"]) / "verdict.json").read_text())
    assert verdict["missing_evidence"][0] == "rank 0: no stack within 0.15 s"


def test_exits_during_the_investigation_count(start: Callable[..., SupervisedRun]) -> None:
    """The first exit may be that of a victim; the killed rank follows."""
    run = start()
    run.raised(0, type="RuntimeError", message="Connection closed by peer [127.0.0.1]:4182")
    run.vote(7)
    first = run.ranks.exit(0, code=1)
    run.ranks.later = [run.ranks.exit(1, signal=9)]
    run.ranks.alive = {1: 901}
    run.poll(first)
    assert run.events("incident")[0]["culprit"] == 1


def test_the_next_attempt_has_its_own_files_and_board(start: Callable[..., SupervisedRun]) -> None:
    """The state is `starting` again."""
    run = start()
    run.vote(7)
    run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    run.attempt()
    assert run.supervisor.attempt.number == 1
    assert run.starts[1].log == run.directory.path / "attempts" / "001" / "rank1.log"
    assert run.starts[1].log.parent.is_dir()
    assert run.state is RunState.starting
    assert run.poll() is Directive.monitor


def test_the_same_exception_at_the_same_step_is_restarted_once(start: Callable[..., SupervisedRun]) -> None:
    """Then the run is given up with code 93, a sentence and the traceback."""
    run = start()
    run.vote(7)
    run.poll()
    run.raised(0)
    assert run.poll(run.ranks.exit(0, code=1)) is Directive.restart
    run.attempt()
    run.train(step=5)
    run.vote(7)
    run.poll()
    run.raised(0)
    assert run.poll(run.ranks.exit(0, code=1)) is Directive.terminate
    assert (run.supervisor.exit_code, run.state) == (93, RunState.failed)
    assert "KeyError" in run.supervisor.sentence
    assert "Traceback ..." in run.messages
    assert run.events("run_ended")[0]["exit_code"] == 93


def test_events_that_the_disk_refuses_count(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, the budget still ends a loop of failures, and the user is notified."""
    run = start(budget=Budget(failures_without_progress=1))
    run.vote(7)
    run.poll()
    write = os.write

    def no_events(descriptor: int, data: bytes) -> int:
        if data.lstrip().startswith(b'{"time"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", no_events)
    run.raised(0)
    assert run.poll(run.ranks.exit(0, signal=9)) is Directive.restart
    run.attempt()
    run.train(step=5)
    assert run.poll(run.ranks.exit(0, signal=9)) is Directive.terminate
    assert (run.supervisor.exit_code, run.state) == (93, RunState.failed)
    assert not run.events("incident")
    status = run.supervisor.status()
    assert status.journal_lost > 0
    assert len(status.history.recoveries) == 2
    assert len([text for text in run.messages if "journal and evidence are incomplete" in text]) == 2, (
        "once an attempt"
    )


def test_a_run_whose_first_event_cannot_be_written_does_not_begin(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next supervisor would not know about this one."""
    run = start()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunDirectoryError, match="free some space"):
        run.supervisor.begin()


def test_an_event_that_the_disk_refuses_is_applied_after_those_of_ranks(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot that was complete before the fault does not refill the budget after it."""
    run = start()
    run.vote(7)
    run.poll()
    rank = Journal(run.directory.journal, "run-1")
    rank.attempt = 0
    rank.write("checkpoint_staged", rank=0, step=7, train_call=1, scheduled=False, seconds=0.1)
    monkeypatch.setattr(os, "write", full)
    assert run.poll(run.ranks.exit(0, signal=9)) is Directive.restart
    assert run.supervisor.history.failures_without_progress == 1
    assert run.supervisor.history.snapshot_step == 7


def full(descriptor: int, data: bytes) -> int:
    """Raise what `write` raises on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failure_before_the_first_step_is_tried_once_more(start: Callable[..., SupervisedRun]) -> None:
    """The same failure again ends the run."""
    run = start()
    run.attempt()
    run.raised(1)
    assert run.poll(run.ranks.exit(1, code=1)) is Directive.restart
    run.attempt()
    run.raised(1)
    assert run.poll(run.ranks.exit(1, code=1)) is Directive.terminate
    assert run.supervisor.exit_code == 93
    assert run.events("incident")[0]["cause"] == "startup_failure"


def test_a_usage_error_found_in_a_rank_ends_with_code_2(start: Callable[..., SupervisedRun]) -> None:
    """The sentence is its message, as if the launcher had found it."""
    run = start()
    run.attempt()
    run.raised(0, type="ConfigError", message="--generation max_time=3.0 did not take effect")
    assert run.poll(run.ranks.exit(0, code=2)) is Directive.terminate
    assert run.supervisor.exit_code == 2
    assert run.supervisor.sentence == "--generation max_time=3.0 did not take effect"


def test_a_finished_script_finishes_the_run(start: Callable[..., SupervisedRun]) -> None:
    """When the last rank has exited."""
    run = start()
    run.vote(100)
    run.done(0, 1)
    assert run.poll(run.ranks.exit(0, code=0)) is Directive.monitor
    assert run.poll(run.ranks.exit(1, code=0)) is Directive.finished
    assert (run.supervisor.exit_code, run.state) == (0, RunState.finished)
    assert run.supervisor.sentence.startswith("Finished at step 100 of 100")


def test_a_signal_after_the_script_completed_is_a_warning(start: Callable[..., SupervisedRun]) -> None:
    """A library that crashes when the interpreter exits does not fail the run."""
    run = start()
    run.vote(100)
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=0))
    assert run.poll(run.ranks.exit(1, signal=11)) is Directive.finished
    assert "SIGSEGV" in run.events("warning")[0]["text"]
    assert run.events("incident") == []


def test_a_stop_ends_with_code_75(start: Callable[..., SupervisedRun]) -> None:
    """The request is on the board, the ranks agree, and the run can be resumed."""
    run = start()
    run.vote(7)
    run.poll()
    run.supervisor.request_stop("SIGTERM")
    assert run.supervisor.board.requests[0]
    assert run.state is RunState.stopping
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=75))
    assert run.poll(run.ranks.exit(1, code=75)) is Directive.stopped
    assert (run.supervisor.exit_code, run.state) == (75, RunState.stopped)
    assert run.supervisor.sentence.startswith("Stopped at step 7")


def test_a_script_that_completes_while_stopping_has_finished(start: Callable[..., SupervisedRun]) -> None:
    """The stop came too late."""
    run = start()
    run.vote(100)
    run.supervisor.request_stop("SIGTERM")
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=0))
    assert run.poll(run.ranks.exit(1, code=0)) is Directive.finished


def test_ranks_that_do_not_stop_are_terminated_after_evidence_is_written(
    start: Callable[..., SupervisedRun], collected: list[dict[int, int]]
) -> None:
    """The second request terminates them at once; earlier checkpoints remain."""
    run = start()
    run.vote(1)
    run.poll()
    run.supervisor.request_stop("SIGTERM")
    assert run.poll() is Directive.monitor
    run.supervisor.request_stop("SIGTERM")
    assert run.poll() is Directive.terminate
    assert collected == [{0: 900, 1: 901}]
    assert run.supervisor.exit_code == 75


def test_a_failure_while_stopping_is_not_restarted(start: Callable[..., SupervisedRun]) -> None:
    """The user wants the run to end."""
    run = start()
    run.vote(7)
    run.supervisor.request_stop("SIGINT")
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.terminate
    assert run.supervisor.exit_code == 75


def test_a_stop_during_a_recovery_reaches_the_next_attempt(start: Callable[..., SupervisedRun]) -> None:
    """It is requested of the new ranks, and the run ends with code 75."""
    run = start()
    run.vote(7)
    run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    run.supervisor.request_stop("SIGTERM")
    run.attempt()
    assert run.supervisor.board.requests[0]
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=75))
    assert run.poll(run.ranks.exit(1, code=75)) is Directive.stopped
    assert (run.supervisor.exit_code, run.state) == (75, RunState.stopped)


def test_a_second_stop_terminates_ranks_that_are_starting(start: Callable[..., SupervisedRun]) -> None:
    """The first request came between two attempts. The exit code is 75."""
    run = start()
    run.vote(7)
    run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    run.supervisor.request_stop("SIGINT")
    run.attempt()
    assert run.state is RunState.stopping
    run.supervisor.request_stop("SIGINT")
    assert run.poll() is Directive.terminate
    assert run.supervisor.exit_code == 75


def test_a_stop_survives_a_membership_change(start: Callable[..., SupervisedRun]) -> None:
    """The restart that a new node causes does not cancel it."""
    run = start()
    run.vote(7)
    run.supervisor.request_stop("SIGTERM")
    run.supervisor.membership_changed()
    run.attempt()
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=75))
    assert run.poll(run.ranks.exit(1, code=75)) is Directive.stopped
    assert run.supervisor.exit_code == 75


def test_ranks_stopped_from_another_node_have_not_finished(start: Callable[..., SupervisedRun]) -> None:
    """The request was made on another node; the local ranks exit with code 75."""
    run = start()
    run.vote(7)
    run.poll()
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=75))
    assert run.poll(run.ranks.exit(1, code=75)) is Directive.stopped
    assert run.supervisor.exit_code == 75


def test_a_rank_that_does_not_exit_is_terminated_with_a_warning(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its deadline without activity. The run has finished."""
    monkeypatch.setattr(exit_hangs, "CHECK_SECONDS", 0.0)
    run = start(deadlines=DeadlineSettings(exit_seconds=1e-9))
    run.remaining = ExitFacts(states={0: "S"}, own={}, awaited={})
    run.vote(100)
    run.done(0, 1)
    deadline = time.monotonic() + 10.0
    while (directive := run.poll()) is Directive.monitor:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert directive is Directive.finished
    assert run.supervisor.exit_code == 0
    assert "did not exit" in run.events("warning")[0]["text"]


def test_a_run_over_its_budget_is_given_up(start: Callable[..., SupervisedRun]) -> None:
    """With a budget of 0, the first failure is the last."""
    run = start(budget=Budget(failures_without_progress=0))
    run.vote(7)
    run.poll()
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.terminate
    assert run.supervisor.exit_code == 93


@pytest.mark.parametrize("recovering", [False, True])
def test_a_run_whose_ranks_cannot_be_started_has_failed(
    start: Callable[..., SupervisedRun], recovering: bool
) -> None:
    """Exit code 93 and `failed`, in memory and in the journal."""
    run = start()
    if recovering:
        run.vote(7)
        run.poll()
        run.poll(run.ranks.exit(1, signal=9))
    run.supervisor.give_up("rank 1 could not be started")
    assert (run.supervisor.exit_code, run.state) == (93, RunState.failed)
    assert run.events("run_ended")[0]["sentence"] == "rank 1 could not be started"
    assert read_status(run.directory).state == "failed"
    assert run.supervisor.status().history.exit_code == 93


def test_a_full_disk_does_not_prevent_the_recovery(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict names the evidence that could not be written."""

    def full(*arguments: object, **more: object) -> collection.Evidence:
        raise OSError(28, "No space left on device")

    run = start()
    run.vote(7)
    run.poll()
    monkeypatch.setattr(collection, "collect", full)
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.restart
    verdict = json.loads((Path(run.events("incident")[0]["incident"]) / "verdict.json").read_text())
    assert "No space left" in verdict["missing_evidence"][0]


def test_a_second_supervisor_continues_the_counts(
    start: Callable[..., SupervisedRun], tmp_path: Path, collected: list[dict[int, int]]
) -> None:
    """Attempts, steps and failures are replayed from the journal."""
    run = start()
    run.vote(7)
    run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    again = SupervisedRun(tmp_path / "run")
    again.attempt()
    assert again.supervisor.attempt.number == 1
    assert again.supervisor.history.step == 7
    assert again.supervisor.history.failures_without_progress == 1


def test_a_truncated_error_file_does_not_prevent_a_verdict(start: Callable[..., SupervisedRun]) -> None:
    """The verdict names the exit code."""
    run = start()
    run.vote(7)
    run.poll()
    run.supervisor.attempt.files.error(0).write_text('{"type": "KeyEr')
    assert run.poll(run.ranks.exit(0, code=1)) is Directive.restart
    assert "exited with code 1" in run.events("incident")[0]["sentence"]


def test_an_exception_with_lone_surrogates_does_not_prevent_the_recovery(
    start: Callable[..., SupervisedRun],
) -> None:
    """Its message may quote an invalid token."""
    run = start()
    run.vote(7)
    run.poll()
    run.raised(0, message="cannot parse '\udc80'")
    assert run.poll(run.ranks.exit(0, code=1)) is Directive.restart


def test_status_in_memory_equals_status_on_disk(start: Callable[..., SupervisedRun]) -> None:
    """Metrics and `grpo-run status` show the same."""
    run = start()
    run.vote(7)
    run.poll()
    run.poll()
    lock = run.directory.acquire()
    memory, disk = run.supervisor.status(), read_status(run.directory)
    os.close(lock)
    assert (memory.state, memory.sentence, memory.supervisor_pid) == (
        disk.state,
        disk.sentence,
        disk.supervisor_pid,
    )
    assert memory.history.step == disk.history.step == 7


def test_a_decision_does_not_depend_on_reading_the_journal_back(start: Callable[..., SupervisedRun]) -> None:
    """The fault just written counts, even if the file can no longer be opened."""
    run = start(budget=Budget(failures_without_progress=0))
    run.vote(7)
    run.poll()
    run.directory.journal.unlink()
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.terminate
    assert run.supervisor.history.failures_without_progress == 1


def test_every_event_counts_once_in_memory_and_on_disk(start: Callable[..., SupervisedRun]) -> None:
    """The history that decisions are based on equals a replay of the journal, over two attempts."""
    run = start()
    rank = Journal(run.directory.journal, "run-1")
    for step in range(1, 8):
        run.vote(step)
        rank.write("checkpoint_published", rank=0, step=step, train_call=1, path=f"out/checkpoint-{step}")
        run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    run.attempt()
    run.train(step=7)
    run.vote(8)
    run.poll()
    run.poll()
    assert run.supervisor.history == History.of(read_journal(run.directory.journal))


@pytest.mark.parametrize(
    ("shown", "wanted"), [(frozenset(), False), (frozenset({0}), True), (frozenset({0, 1}), True)]
)
def test_the_traceback_of_a_recovered_exception_is_the_culprits(
    start: Callable[..., SupervisedRun], shown: frozenset[int], wanted: bool
) -> None:
    """It is shown if the output of any rank is; the terminal holds back what these ranks print."""
    run = start(shown_ranks=shown)
    run.vote(7)
    run.poll()
    peer_gone = "Connection closed by peer [127.0.0.1]:4182"
    run.raised(0, type="RuntimeError", message=peer_gone, traceback="Traceback of rank 0")
    run.raised(1, traceback="Traceback of rank 1")
    exits = [run.ranks.exit(0, code=1), run.ranks.exit(1, code=1)]
    assert run.poll(*exits) is Directive.restart
    assert "Traceback of rank 0" not in run.messages
    assert ("Traceback of rank 1" in run.messages) is wanted
    assert run.supervisor.history.recoveries[0].lost_connection == (0,)


def test_a_rank_that_has_not_exited_yet_is_named_with_its_error(start: Callable[..., SupervisedRun]) -> None:
    """Exit handlers take a while, but its error file says that it lost its connection."""
    run = start()
    run.vote(7)
    run.poll()
    run.raised(0, type="RuntimeError", message="Connection closed by peer")
    run.raised(1)
    run.poll(run.ranks.exit(1, code=1))
    (recovery,) = run.supervisor.history.recoveries
    assert (recovery.rank, recovery.lost_connection, recovery.also_failed) == (1, (0,), ())


def test_no_traceback_is_shown_if_every_rank_is_a_victim(start: Callable[..., SupervisedRun]) -> None:
    """A connection error is not the cause; that is on another node."""
    run = start(budget=Budget(failures_without_progress=0))
    run.vote(7)
    run.poll()
    for rank in (0, 1):
        run.raised(rank, type="RuntimeError", message="Connection closed by peer", traceback="Traceback")
    assert run.poll(run.ranks.exit(0, code=1), run.ranks.exit(1, code=1)) is Directive.terminate
    assert run.supervisor.exit_code == 93
    assert "Traceback" not in run.messages


@pytest.mark.parametrize("message", ["bad config: foo", "bad config: foo."])
def test_a_verdict_and_the_reason_to_give_up_are_two_sentences(
    start: Callable[..., SupervisedRun], message: str
) -> None:
    """A full stop separates them, whether or not the exception's message ends with one."""
    run = start(budget=Budget(failures_without_progress=0))
    run.vote(7)
    run.poll()
    run.raised(0, type="ValueError", message=message)
    run.poll(run.ranks.exit(0, code=1))
    sentence = run.supervisor.sentence
    assert "bad config: foo. Gave up: " in sentence
    assert sentence.endswith("(budget 0).")


def test_a_second_stop_states_how_long_the_ranks_had(start: Callable[..., SupervisedRun]) -> None:
    """The full timeout has not passed."""
    run = start()
    run.vote(1)
    run.poll()
    run.supervisor.request_stop("SIGINT")
    run.supervisor.request_stop("SIGINT")
    run.poll()
    (text,) = [text for text in run.messages if "did not stop" in text]
    assert "within 0 s after the stop request" in text


def test_a_stopped_run_is_shown_as_stopped(start: Callable[..., SupervisedRun]) -> None:
    """Memory and journal agree; the run has not failed."""
    run = start()
    run.vote(7)
    run.supervisor.request_stop("SIGTERM")
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=75), run.ranks.exit(1, code=75))
    assert run.supervisor.status().state == read_status(run.directory).state == "stopped"


def test_a_run_that_has_ended_cannot_be_given_up(start: Callable[..., SupervisedRun]) -> None:
    """A rank that survives SIGKILL after the stop changes nothing about the exit code.

    The user is notified.
    """
    run = start()
    run.supervisor.request_stop("SIGTERM")
    run.supervisor.request_stop("SIGTERM")
    run.poll()
    run.supervisor.give_up("processes [901] survived SIGKILL for 10 s")
    assert (run.supervisor.exit_code, run.state) == (75, RunState.stopped)
    assert run.messages[-1] == "processes [901] survived SIGKILL for 10 s"
    assert len(run.events("run_ended")) == 1


def test_the_journal_contains_only_lifecycle_events_that_happened(
    start: Callable[..., SupervisedRun],
) -> None:
    """A membership change is neither a fault nor evidence; a stop between attempts is no restart."""
    run = start()
    run.vote(7)
    run.poll()
    run.supervisor.membership_changed()
    run.attempt()
    run.vote(8)
    run.train(step=7)
    run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    run.supervisor.stop_without_ranks("SIGTERM")
    changes = [(record["because"], record["to"]) for record in run.events("state_changed")]
    assert changes == [
        ("step_committed", "running"), ("membership_changed", "recovering"), ("restarted", "starting"),
        ("fault", "collecting"), ("evidence_written", "recovering"), ("stop_requested", "stopping"),
        ("stopped", "stopped"),
    ]  # fmt: skip
    assert run.supervisor.exit_code == 75


def test_giving_up_before_the_first_rank_writes_one_lifecycle_event(
    start: Callable[..., SupervisedRun],
) -> None:
    """No rank failed and no evidence was written."""
    run = start()
    run.supervisor.give_up("RendezvousTimeoutError: no second node")
    assert [record["because"] for record in run.events("state_changed")] == ["gave_up"]


@pytest.mark.parametrize("where", ["starting", "first step", "first step, resumed"])
def test_a_stop_before_the_first_step_ends_the_run_at_once(
    start: Callable[..., SupervisedRun], where: str
) -> None:
    """There is nothing to save, so there is nothing to wait for."""
    run = start()
    if where != "starting":
        run.train(step=5 if "resumed" in where else 0)
    run.poll()
    run.supervisor.stop.note("SIGTERM")
    assert run.poll() is Directive.terminate
    assert (run.supervisor.exit_code, run.state) == (75, RunState.stopped)
    assert run.events("incident") == []


@pytest.mark.parametrize(
    "where", ["after a step", "between two calls", "second call", "after a restored call"]
)
def test_a_stop_later_waits_for_the_ranks(start: Callable[..., SupervisedRun], where: str) -> None:
    """They may be about to save."""
    run = start()
    run.train(step=0)
    if where == "after a step":
        run.vote(1)
    for slot in run.slots.values():
        if where == "after a restored call":
            slot.step = slot.resumed_step = 100
        if where == "second call":
            slot.train_call = 2
        elif where != "after a step":
            slot.state = RankState.between
        slot.publish()
    run.poll()
    run.supervisor.stop.note("SIGTERM")
    assert run.poll() is Directive.monitor


def break_detector(run: SupervisedRun, error: Exception) -> None:
    """Let the next poll fail."""

    def scan(slots: object) -> None:
        raise error

    run.supervisor.detector.scan = scan  # type: ignore[method-assign, assignment]


def test_a_failure_of_the_supervisor_stops_the_ranks_in_order(start: Callable[..., SupervisedRun]) -> None:
    """The ranks save; the report has the traceback; one line names it; the run can be resumed."""
    run = start()
    run.vote(3)
    run.poll()
    run.ranks.later = [run.ranks.exit(0, code=75), run.ranks.exit(1, code=75)]
    Journal(run.directory.journal, "run-1").write(
        "checkpoint_published", step=3, path="checkpoint-3", verified=True
    )
    break_detector(run, KeyError("rank"))
    run.ranks.alive = dict(run.ranks.pids)

    def wait(seconds: float) -> list[Exit]:
        assert run.supervisor.board.requests[0]
        run.ranks.alive.clear()
        return run.ranks.later

    run.ranks.wait = wait  # type: ignore[method-assign]
    assert run.poll() is Directive.terminate
    assert (run.supervisor.exit_code, run.state) == (75, RunState.stopped)
    (line,) = [text for text in run.messages if "itself failed" in text]
    assert "KeyError: 'rank' (test_supervisor.py:" in line
    assert "\n" not in line
    report = json.loads(Path(line.partition("Report: ")[2]).read_text())
    assert "Traceback (most recent call last)" in report["traceback"]
    assert report["cause"] == "unknown"
    assert run.events("run_ended")[-1]["exit_code"] == 75


@pytest.mark.parametrize("why", ["no step", "no new checkpoint", "a rank has failed"])
def test_a_failure_of_the_supervisor_without_progress_gives_the_run_up(
    start: Callable[..., SupervisedRun], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command could fail in the same way for ever."""
    run = start()
    if why != "no step":
        run.vote(3)
        run.poll()
    if why == "a rank has failed":
        monkeypatch.setattr(incident, "diagnose_exits", lambda *arguments, **options: 1 // 0)
        directive = run.poll(run.ranks.exit(1, signal=9))
    else:
        exits = [run.ranks.exit(0, code=75), run.ranks.exit(1, code=75)]
        run.ranks.later = exits
        break_detector(run, AttributeError("torch has changed"))
        directive = run.poll()
    assert directive is Directive.terminate
    assert (run.supervisor.exit_code, run.state) == (93, RunState.failed)
    assert len([text for text in run.messages if "itself failed" in text]) == 1


@pytest.mark.parametrize("error", [OSError(errno.EMFILE, "Too many open files"), MemoryError("no memory")])
def test_a_lack_of_descriptors_or_memory_costs_one_warning(
    start: Callable[..., SupervisedRun], error: Exception
) -> None:
    """What is not observed is no reason to act."""
    run = start()
    run.vote(3)
    run.poll()
    break_detector(run, error)
    for _ in range(5):
        assert run.poll() is Directive.monitor
    (text,) = [text for text in run.messages if "at present" in text]
    assert text == f"the watchdog cannot observe the ranks at present: {error}"


def test_a_report_that_cannot_be_written_is_printed(start: Callable[..., SupervisedRun]) -> None:
    """The traceback is not lost, and the run still ends in order."""
    run = start()
    run.directory.incidents.rmdir()
    break_detector(run, ValueError("broken"))
    assert run.poll() is Directive.terminate
    assert run.supervisor.exit_code == 93
    (text,) = [text for text in run.messages if "itself failed" in text]
    assert "not written (No such file or directory)" in text
    assert "Traceback" in text


def test_a_failed_thread_is_reported_and_the_run_goes_on(start: Callable[..., SupervisedRun]) -> None:
    """Its traceback is in a file; one line names it."""
    run = start()
    run.supervisor.note_thread_failure("grpo-run-output", RuntimeError("no memory"))
    assert run.poll() is Directive.monitor
    (text,) = run.messages
    assert text.startswith(
        "grpo-run-output has failed, and the run goes on without it: RuntimeError: no memory"
    )
    assert Path(text.partition("Report: ")[2]).exists()


def test_an_exception_of_the_agent_ends_the_run_with_a_report(start: Callable[..., SupervisedRun]) -> None:
    """The agent has terminated the ranks; a run that has ended keeps its exit code."""
    run = start()
    run.supervisor.fail(AttributeError("torch has changed"))
    assert (run.supervisor.exit_code, run.state) == (93, RunState.failed)
    run.supervisor.fail(AttributeError("once more"))
    assert run.supervisor.exit_code == 93
    assert len(run.events("run_ended")) == 1


@pytest.mark.parametrize(("strict", "code"), [(False, 0), (True, 93)])
def test_a_run_whose_drill_never_happened_says_so(
    start: Callable[..., SupervisedRun], strict: bool, code: int
) -> None:
    """It is in the last sentence and counts as a warning; under --strict-drills the run has failed."""
    run = start(injections=(parse_injection("kill@rank1:step9"),), strict_drills=strict)
    run.vote(6)
    run.poll()
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=0), run.ranks.exit(1, code=0))
    assert run.supervisor.exit_code == run.supervisor.status().history.exit_code == code
    assert run.supervisor.status().state == ("failed" if strict else "finished")
    missed = "1 drill never happened: kill@rank1:step9 (the run ended at step 6)."
    assert run.supervisor.sentence.endswith(missed)
    assert [record["text"] for record in run.events("warning")] == [missed]
    assert run.events("run_ended")[0]["sentence"] == run.supervisor.sentence


def test_a_drill_that_happened_lets_a_strict_run_finish(start: Callable[..., SupervisedRun]) -> None:
    """The event of the rank may come with its exit."""
    drill = parse_injection("slow@rank1:step2")
    run = start(injections=(drill,), strict_drills=True)
    run.vote(6)
    run.poll()
    Journal(run.directory.journal, "run-1").write("fault_injected", rank=1, injection=str(drill))
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=0), run.ranks.exit(1, code=0))
    assert (run.supervisor.exit_code, run.events("warning")) == (0, [])


def test_a_stopped_run_may_still_reach_its_drill(start: Callable[..., SupervisedRun]) -> None:
    """The same command continues it."""
    run = start(injections=(parse_injection("kill@rank1:step9"),), strict_drills=True)
    run.vote(6)
    run.poll()
    run.supervisor.request_stop("SIGTERM")
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=75), run.ranks.exit(1, code=75))
    assert (run.supervisor.exit_code, run.events("warning")) == (75, [])


def test_a_script_that_trains_by_itself_is_stopped_by_sigterm(start: Callable[..., SupervisedRun]) -> None:
    """What a restart means is said once. The code is the script's, or 93."""
    run = start()
    for rank, slot in run.slots.items():
        slot.state, slot.train_call, slot.alone_after = RankState.starting, 0, 1
        slot.publish()
        Journal(run.directory.journal, "run-1").write("own_training", rank=rank, trainer="")
    run.poll()
    run.poll()
    said = [text for text in run.messages if "no Trainer and no loop" in text]
    assert said == [
        "the script takes optimizer steps with no Trainer and no loop: a restart begins the script anew; nothing is saved"
    ]
    assert run.state is RunState.running
    run.supervisor.request_stop("SIGTERM")
    assert run.poll() is Directive.monitor
    assert run.ranks.signals == 1
    assert run.poll(run.ranks.exit(0, signal=15)) is Directive.monitor
    assert run.poll(run.ranks.exit(1, signal=15)) is Directive.terminate
    assert (run.supervisor.exit_code, run.state) == (93, RunState.stopped)
    assert run.events("incident") == []
    assert read_status(run.directory).history.state == "stopped"


def test_a_train_call_after_steps_of_the_script_is_said(start: Callable[..., SupervisedRun]) -> None:
    """What was said before is true of the steps before it only."""
    run = start()
    journal = Journal(run.directory.journal, "run-1")
    journal.write("own_training", rank=0, trainer="")
    run.poll()
    journal.write(
        "train_started", rank=0, train_call=1, step=0, trainer_class="GRPOTrainer", output_dir="/out"
    )
    run.poll()
    run.poll()
    said = [text for text in run.messages if "counted and saved" in text]
    assert said == ["train() call 1 (GRPOTrainer in /out) begins: its steps are counted and saved"]
