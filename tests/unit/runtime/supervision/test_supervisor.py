"""The supervisor's decisions, with a real board and journal and stand-ins for the ranks' processes."""

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

from grpo_run.runtime.board.board import SlotWriter
from grpo_run.runtime.detection import exit_hangs
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.launch.config import Budget, RunConfig
from grpo_run.runtime.processes.agent import Directive, RankStart
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import Journal, read_journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import read_status
from grpo_run.runtime.supervision import incident
from grpo_run.runtime.supervision.lifecycle import RunState
from grpo_run.runtime.supervision.supervisor import Supervisor
from grpo_run.watchdog import processes
from grpo_run.watchdog.evidence import collection
from grpo_run.watchdog.observation import Exit, Phase, RankState
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


class Ranks:
    """Two ranks' processes as far as the supervisor sees them."""

    def __init__(self) -> None:
        self.pids = {0: 900, 1: 901}
        self.alive = dict(self.pids)
        self.later: list[Exit] = []
        self._seen = 0

    def exit(self, rank: int, *, code: int | None = None, signal: int | None = None) -> Exit:
        """One ends."""
        del self.alive[rank]
        self._seen += 1
        return Exit(rank=rank, pid=900 + rank, exit_code=code, signal=signal, order=self._seen - 1)

    def wait(self, timeout_seconds: float) -> list[Exit]:
        """Those that end while evidence is gathered; then nobody is left to wait for."""
        later, self.later = self.later, []
        return later


class Night:
    """A supervisor, its ranks and what it says."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.directory = RunDirectory(path=path)
        self.directory.create()
        self.directory.write_run({"run_id": "night"})
        fields: dict[str, Any] = {
            "run_id": "night", "run_directory": path, "target": "train.py", "module": False, "arguments": (),
            "command": ("train.py",), "environment": {},
        }  # fmt: skip
        self.said: list[str] = []
        self.supervisor = Supervisor(
            RunConfig(**(fields | changes)),
            self.directory,
            local_world_size=2,
            rank_environment=lambda supervisor, rank, world_size: {},
            notify=self.said.append,
        )
        self.supervisor.begin()
        self.ranks = Ranks()
        self.starts: Mapping[int, RankStart] = {}
        self.slots: dict[int, SlotWriter] = {}

    def attempt(self, *, world_size: int = 2) -> None:
        """Start an attempt as the agent would."""
        self.ranks = Ranks()
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
            slot.touch()

    def vote(self, step: int, ranks: Sequence[int] = (0, 1)) -> None:
        """These ranks have done a step."""
        for rank in ranks:
            self.slots[rank].step = self.slots[rank].voted_step = step
            self.slots[rank].voted_at_ns = time.monotonic_ns()
            self.slots[rank].touch()

    def done(self, *ranks: int) -> None:
        """These ranks' scripts have run their last line."""
        for rank in ranks:
            self.slots[rank].state = RankState.done
            self.slots[rank].touch()

    def raised(self, rank: int, **changes: Any) -> None:
        """A rank's bootstrap wrote down an exception."""
        record = {
            "type": "KeyError", "message": "'reward'", "traceback": "Traceback ...", "wall_time": time.time(),
            "location": ["train.py", 3, "reward"],
        }  # fmt: skip
        self.supervisor.attempt.files.error(rank).write_text(json.dumps(record | changes))

    def poll(self, *exits: Exit) -> Directive:
        """One look."""
        return self.supervisor.poll(cast(RankGroup, self.ranks), exits)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The journal's events of one kind."""
        return [record for record in read_journal(self.directory.journal) if record["event"] == name]

    @property
    def state(self) -> RunState:
        """Where the lifecycle is."""
        return self.supervisor.lifecycle.state


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """The living pids of each collection of evidence; no signal is sent to anybody."""
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
def start(tmp_path: Path, collected: list[dict[int, int]]) -> Callable[..., Night]:
    """A night that has begun, its first attempt training."""

    def make(**changes: Any) -> Night:
        night = Night(tmp_path / "night", **changes)
        night.attempt()
        night.train()
        return night

    return make


def test_a_step_is_committed_when_every_rank_has_voted(start: Callable[..., Night]) -> None:
    """Not before, and once."""
    night = start()
    night.vote(1, ranks=[0])
    assert night.poll() is Directive.monitor
    assert night.events("step_committed") == []
    night.vote(1, ranks=[1])
    night.poll()
    night.poll()
    assert [(record["step"], record["target_steps"]) for record in night.events("step_committed")] == [
        (1, 100)
    ]
    assert night.state is RunState.running


def test_a_rank_on_another_node_is_waited_for(start: Callable[..., Night]) -> None:
    """With ranks that this board does not show, only the vote's outcome says that all have voted."""
    night = start()
    night.attempt(world_size=4)
    night.train()
    night.vote(1)
    night.poll()
    assert night.events("step_committed") == []
    night.slots[0].committed_step = 1
    night.slots[0].touch()
    night.poll()
    assert [record["step"] for record in night.events("step_committed")] == [1]


def test_the_step_resumed_from_is_not_committed_again(start: Callable[..., Night]) -> None:
    """It was committed by the attempt before."""
    night = start()
    night.train(step=5)
    night.poll()
    assert night.events("step_committed") == []


def test_an_unreadable_slot_commits_nothing(start: Callable[..., Night]) -> None:
    """What could not be observed is not taken for done."""
    night = start()
    night.vote(1)
    night.supervisor.board.begin_attempt(0)
    night.poll()
    assert night.events("step_committed") == []


def test_a_killed_rank_is_recovered_after_its_evidence(
    start: Callable[..., Night], collected: list[dict[int, int]]
) -> None:
    """Fault, evidence of the living, verdict, decision, restart: in this order in the journal."""
    night = start()
    night.vote(7)
    night.poll()
    assert night.poll(night.ranks.exit(1, signal=9)) is Directive.restart
    assert collected == [{0: 900}]
    assert night.state is RunState.recovering
    names = [record["event"] for record in read_journal(night.directory.journal)]
    assert [name for name in names if name in ("incident", "action", "attempt_ended")] == [
        "incident", "action", "attempt_ended",
    ]  # fmt: skip
    (record,) = night.events("incident")
    assert (record["cause"], record["culprit"], record["step"]) == ("signal", 1, 7)
    assert night.events("action")[0]["action"] == "restart"
    verdict = json.loads((Path(record["incident"]) / "verdict.json").read_text())
    assert verdict["missing_evidence"][0] == "rank 0: no stack within 0.15 s"


def test_victims_that_fall_while_evidence_is_gathered_are_heard(start: Callable[..., Night]) -> None:
    """The first to be seen may be a victim; the killed rank comes a moment later."""
    night = start()
    night.raised(0, type="RuntimeError", message="Connection closed by peer [127.0.0.1]:4182")
    night.vote(7)
    first = night.ranks.exit(0, code=1)
    night.ranks.later = [night.ranks.exit(1, signal=9)]
    night.ranks.alive = {1: 901}
    night.poll(first)
    assert night.events("incident")[0]["culprit"] == 1


def test_the_attempt_after_is_numbered_and_starts_anew(start: Callable[..., Night]) -> None:
    """An own directory, an empty board, the state `starting`."""
    night = start()
    night.vote(7)
    night.poll()
    night.poll(night.ranks.exit(1, signal=9))
    night.attempt()
    assert night.supervisor.attempt.number == 1
    assert night.starts[1].log == night.directory.path / "attempts" / "001" / "rank1.log"
    assert night.starts[1].log.parent.is_dir()
    assert night.state is RunState.starting
    assert night.poll() is Directive.monitor


def test_the_same_exception_at_the_same_step_is_not_tried_a_third_time(start: Callable[..., Night]) -> None:
    """Given up with 93, the sentence and the traceback said."""
    night = start()
    night.vote(7)
    night.poll()
    night.raised(0)
    assert night.poll(night.ranks.exit(0, code=1)) is Directive.restart
    night.attempt()
    night.train(step=5)
    night.vote(7)
    night.poll()
    night.raised(0)
    assert night.poll(night.ranks.exit(0, code=1)) is Directive.terminate
    assert (night.supervisor.exit_code, night.state) == (93, RunState.failed)
    assert "KeyError" in night.supervisor.sentence
    assert "Traceback ..." in night.said
    assert night.events("run_ended")[0]["exit_code"] == 93


def test_what_the_disk_does_not_take_counts_all_the_same(
    start: Callable[..., Night], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run directory on a full disk: budgets still end a loop of failures, and whoever watches hears of it."""
    night = start(budget=Budget(failures_without_progress=1))
    night.vote(7)
    night.poll()
    write = os.write

    def no_events(descriptor: int, data: bytes) -> int:
        if data.lstrip().startswith(b'{"time"'):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", no_events)
    night.raised(0)
    assert night.poll(night.ranks.exit(0, signal=9)) is Directive.restart
    night.attempt()
    night.train(step=5)
    assert night.poll(night.ranks.exit(0, signal=9)) is Directive.terminate
    assert (night.supervisor.exit_code, night.state) == (93, RunState.failed)
    assert not night.events("incident")
    status = night.supervisor.status()
    assert status.journal_lost > 0
    assert len(status.history.recoveries) == 2
    assert len([text for text in night.said if "journal and evidence are incomplete" in text]) == 2, (
        "once an attempt"
    )


def test_a_run_that_cannot_write_its_first_line_does_not_begin(
    start: Callable[..., Night], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next supervisor would not know of this one."""
    night = start()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunDirectoryError, match="free some space"):
        night.supervisor.begin()


def test_a_lost_event_comes_after_what_ranks_have_written(
    start: Callable[..., Night], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot in the file, not read yet, came before the fault: it does not refill the budget after it."""
    night = start()
    night.vote(7)
    night.poll()
    rank = Journal(night.directory.journal, "night")
    rank.attempt = 0
    rank.write("checkpoint_staged", rank=0, step=7, train_call=1, scheduled=False, seconds=0.1)
    monkeypatch.setattr(os, "write", full)
    assert night.poll(night.ranks.exit(0, signal=9)) is Directive.restart
    assert night.supervisor.history.failures_without_progress == 1
    assert night.supervisor.history.snapshot_step == 7


def full(descriptor: int, data: bytes) -> int:
    """The `write` of a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_failing_before_the_first_step_is_given_up_at_once(start: Callable[..., Night]) -> None:
    """A restart would repeat it."""
    night = start()
    night.attempt()
    night.raised(1)
    assert night.poll(night.ranks.exit(1, code=1)) is Directive.terminate
    assert night.supervisor.exit_code == 93
    assert night.events("incident")[0]["cause"] == "startup_failure"


def test_an_error_of_the_users_found_in_a_rank_is_said_as_one(start: Callable[..., Night]) -> None:
    """Exit code 2 and its own line, as if the launcher had found it."""
    night = start()
    night.attempt()
    night.raised(0, type="ConfigError", message="--generation max_time=3.0 did not take effect")
    assert night.poll(night.ranks.exit(0, code=2)) is Directive.terminate
    assert night.supervisor.exit_code == 2
    assert night.supervisor.sentence == "--generation max_time=3.0 did not take effect"


def test_a_finished_script_finishes_the_run(start: Callable[..., Night]) -> None:
    """When the last rank has left."""
    night = start()
    night.vote(100)
    night.done(0, 1)
    assert night.poll(night.ranks.exit(0, code=0)) is Directive.monitor
    assert night.poll(night.ranks.exit(1, code=0)) is Directive.finished
    assert (night.supervisor.exit_code, night.state) == (0, RunState.finished)
    assert night.supervisor.sentence.startswith("Finished at step 100 of 100")


def test_a_signal_after_the_last_line_is_a_warning(start: Callable[..., Night]) -> None:
    """The rank's work was done: a library that crashes in its teardown cannot fail the run."""
    night = start()
    night.vote(100)
    night.done(0, 1)
    night.poll(night.ranks.exit(0, code=0))
    assert night.poll(night.ranks.exit(1, signal=11)) is Directive.finished
    assert "SIGSEGV" in night.events("warning")[0]["text"]
    assert night.events("incident") == []


def test_a_stop_ends_with_75(start: Callable[..., Night]) -> None:
    """Asked on the board, agreed by the ranks, and the same command goes on."""
    night = start()
    night.vote(7)
    night.poll()
    night.supervisor.request_stop("SIGTERM")
    assert night.supervisor.board.requests[0]
    assert night.state is RunState.stopping
    night.done(0, 1)
    night.poll(night.ranks.exit(0, code=75))
    assert night.poll(night.ranks.exit(1, code=75)) is Directive.stopped
    assert (night.supervisor.exit_code, night.state) == (75, RunState.stopped)
    assert night.supervisor.sentence.startswith("Stopped at step 7")


def test_a_script_that_ends_while_stopping_has_finished(start: Callable[..., Night]) -> None:
    """The stop came too late to matter."""
    night = start()
    night.vote(100)
    night.supervisor.request_stop("SIGTERM")
    night.done(0, 1)
    night.poll(night.ranks.exit(0, code=0))
    assert night.poll(night.ranks.exit(1, code=0)) is Directive.finished


def test_ranks_that_do_not_stop_are_ended_after_their_evidence(
    start: Callable[..., Night], collected: list[dict[int, int]]
) -> None:
    """At the second request at once; the last checkpoint counts."""
    night = start()
    night.supervisor.request_stop("SIGTERM")
    assert night.poll() is Directive.monitor
    night.supervisor.request_stop("SIGTERM")
    assert night.poll() is Directive.terminate
    assert collected == [{0: 900, 1: 901}]
    assert night.supervisor.exit_code == 75


def test_a_failure_while_stopping_is_not_restarted(start: Callable[..., Night]) -> None:
    """The person wanted it to end."""
    night = start()
    night.vote(7)
    night.supervisor.request_stop("SIGINT")
    assert night.poll(night.ranks.exit(1, signal=9)) is Directive.terminate
    assert night.supervisor.exit_code == 75


def test_a_stop_during_recovery_is_obeyed_by_the_next_attempt(start: Callable[..., Night]) -> None:
    """Asked between two attempts, it is asked of the new ranks, and ends the run with 75."""
    night = start()
    night.vote(7)
    night.poll()
    night.poll(night.ranks.exit(1, signal=9))
    night.supervisor.request_stop("SIGTERM")
    night.attempt()
    assert night.supervisor.board.requests[0]
    night.done(0, 1)
    night.poll(night.ranks.exit(0, code=75))
    assert night.poll(night.ranks.exit(1, code=75)) is Directive.stopped
    assert (night.supervisor.exit_code, night.state) == (75, RunState.stopped)


def test_a_second_stop_ends_ranks_that_were_only_starting(start: Callable[..., Night]) -> None:
    """Asked once between two attempts and once more during the next: ended at once, with 75."""
    night = start()
    night.vote(7)
    night.poll()
    night.poll(night.ranks.exit(1, signal=9))
    night.supervisor.request_stop("SIGINT")
    night.attempt()
    assert night.state is RunState.stopping
    night.supervisor.request_stop("SIGINT")
    assert night.poll() is Directive.terminate
    assert night.supervisor.exit_code == 75


def test_a_stop_while_nodes_join_is_still_a_stop(start: Callable[..., Night]) -> None:
    """The restart that a new node causes does not forget it."""
    night = start()
    night.vote(7)
    night.supervisor.request_stop("SIGTERM")
    night.supervisor.membership_changed()
    night.attempt()
    night.done(0, 1)
    night.poll(night.ranks.exit(0, code=75))
    assert night.poll(night.ranks.exit(1, code=75)) is Directive.stopped
    assert night.supervisor.exit_code == 75


def test_ranks_stopped_from_another_node_have_not_finished(start: Callable[..., Night]) -> None:
    """The stop was asked of another node's supervisor; what this one saw are ranks that left with 75."""
    night = start()
    night.vote(7)
    night.poll()
    night.done(0, 1)
    night.poll(night.ranks.exit(0, code=75))
    assert night.poll(night.ranks.exit(1, code=75)) is Directive.stopped
    assert night.supervisor.exit_code == 75


def test_a_rank_that_does_not_leave_after_its_last_line_is_ended(
    start: Callable[..., Night], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it does nothing any more until the deadline; with a warning, for the run has finished."""
    monkeypatch.setattr(exit_hangs, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(processes, "connected_elsewhere", lambda pid: False)
    monkeypatch.setattr(
        processes, "read_main_thread", lambda pid: processes.MainThread(state="S", cpu_seconds=1.0)
    )
    usage = processes.SessionUsage(members=(900,), cpu_seconds=1.0, io_bytes=1)
    monkeypatch.setattr(processes, "read_session", lambda pid: usage)
    night = start(deadlines=DeadlineSettings(exit_seconds=1e-9))
    night.vote(100)
    night.done(0, 1)
    night.poll()
    assert night.poll() is Directive.finished
    assert night.supervisor.exit_code == 0
    assert "did not leave" in night.events("warning")[0]["text"]


def test_over_the_budget_it_is_given_up(start: Callable[..., Night]) -> None:
    """With a budget of none, the first failure is the last."""
    night = start(budget=Budget(failures_without_progress=0))
    night.vote(7)
    night.poll()
    assert night.poll(night.ranks.exit(1, signal=9)) is Directive.terminate
    assert night.supervisor.exit_code == 93


@pytest.mark.parametrize("recovering", [False, True])
def test_a_run_whose_ranks_cannot_be_started_has_failed(
    start: Callable[..., Night], recovering: bool
) -> None:
    """93 and `failed`, in memory and in the journal: not still starting, or recovering for ever."""
    night = start()
    if recovering:
        night.vote(7)
        night.poll()
        night.poll(night.ranks.exit(1, signal=9))
    night.supervisor.give_up("rank 1 could not be started")
    assert (night.supervisor.exit_code, night.state) == (93, RunState.failed)
    assert night.events("run_ended")[0]["sentence"] == "rank 1 could not be started"
    assert read_status(night.directory).state == "failed"
    assert night.supervisor.status().history.exit_code == 93


def test_a_disk_that_is_full_does_not_stop_the_recovery(
    start: Callable[..., Night], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What evidence could not be written is named in the verdict."""

    def full(*arguments: object, **more: object) -> collection.Evidence:
        raise OSError(28, "No space left on device")

    night = start()
    night.vote(7)
    night.poll()
    monkeypatch.setattr(collection, "collect", full)
    assert night.poll(night.ranks.exit(1, signal=9)) is Directive.restart
    verdict = json.loads((Path(night.events("incident")[0]["incident"]) / "verdict.json").read_text())
    assert "No space left" in verdict["missing_evidence"][0]


def test_a_second_supervisor_goes_on_counting(
    start: Callable[..., Night], tmp_path: Path, collected: list[dict[int, int]]
) -> None:
    """Attempts, steps and failures come from the journal."""
    night = start()
    night.vote(7)
    night.poll()
    night.poll(night.ranks.exit(1, signal=9))
    again = Night(tmp_path / "night")
    again.attempt()
    assert again.supervisor.attempt.number == 1
    assert again.supervisor.history.step == 7
    assert again.supervisor.history.failures_without_progress == 1


def test_an_error_file_cut_short_does_not_stop_the_diagnosis(start: Callable[..., Night]) -> None:
    """What can be read is used; the exit code is told."""
    night = start()
    night.vote(7)
    night.poll()
    night.supervisor.attempt.files.error(0).write_text('{"type": "KeyEr')
    assert night.poll(night.ranks.exit(0, code=1)) is Directive.restart
    assert "exited with code 1" in night.events("incident")[0]["sentence"]


def test_words_that_are_no_valid_text_do_not_stop_the_recovery(start: Callable[..., Night]) -> None:
    """An exception may quote a broken token; the supervisor outlives it."""
    night = start()
    night.vote(7)
    night.poll()
    night.raised(0, message="cannot parse '\udc80'")
    assert night.poll(night.ranks.exit(0, code=1)) is Directive.restart


def test_status_from_memory_is_that_of_the_journal(start: Callable[..., Night]) -> None:
    """What the metrics show is what `grpo-run status` shows."""
    night = start()
    night.vote(7)
    night.poll()
    night.poll()
    lock = night.directory.acquire()
    told, read = night.supervisor.status(), read_status(night.directory)
    os.close(lock)
    assert (told.state, told.sentence, told.supervisor_pid) == (
        read.state,
        read.sentence,
        read.supervisor_pid,
    )
    assert told.history.step == read.history.step == 7


def test_a_decision_does_not_depend_on_reading_the_journal_back(start: Callable[..., Night]) -> None:
    """The fault just written counts, even if the file can no longer be opened."""
    night = start(budget=Budget(failures_without_progress=0))
    night.vote(7)
    night.poll()
    night.directory.journal.unlink()
    assert night.poll(night.ranks.exit(1, signal=9)) is Directive.terminate
    assert night.supervisor.history.failures_without_progress == 1


def test_every_event_counts_once_in_memory_and_on_disk(start: Callable[..., Night]) -> None:
    """The history that decisions are based on equals a replay of the journal, over two attempts."""
    night = start()
    rank = Journal(night.directory.journal, "night")
    for step in range(1, 8):
        night.vote(step)
        rank.write("checkpoint_published", rank=0, step=step, train_call=1, path=f"out/checkpoint-{step}")
        night.poll()
    night.poll(night.ranks.exit(1, signal=9))
    night.attempt()
    night.train(step=7)
    night.vote(8)
    night.poll()
    night.poll()
    assert night.supervisor.history == History.of(read_journal(night.directory.journal))


@pytest.mark.parametrize("shown", [frozenset({0}), frozenset({0, 1})])
def test_the_traceback_of_a_recovered_exception_is_the_culprits(
    start: Callable[..., Night], shown: frozenset[int]
) -> None:
    """Rank 0 prints its connection error; the culprit's traceback appears unless its own output is shown."""
    night = start(shown_ranks=shown)
    night.vote(7)
    night.poll()
    peer_gone = "Connection closed by peer [127.0.0.1]:4182"
    night.raised(0, type="RuntimeError", message=peer_gone, traceback="Traceback of rank 0")
    night.raised(1, traceback="Traceback of rank 1")
    exits = [night.ranks.exit(0, code=1), night.ranks.exit(1, code=1)]
    assert night.poll(*exits) is Directive.restart
    assert "Traceback of rank 0" not in night.said
    assert ("Traceback of rank 1" in night.said) is (1 not in shown)


def test_no_traceback_is_shown_if_every_rank_is_a_victim(start: Callable[..., Night]) -> None:
    """A connection error is not the cause; that is on another node."""
    night = start(budget=Budget(failures_without_progress=0))
    night.vote(7)
    night.poll()
    for rank in (0, 1):
        night.raised(rank, type="RuntimeError", message="Connection closed by peer", traceback="Traceback")
    assert night.poll(night.ranks.exit(0, code=1), night.ranks.exit(1, code=1)) is Directive.terminate
    assert night.supervisor.exit_code == 93
    assert "Traceback" not in night.said


@pytest.mark.parametrize("message", ["bad config: foo", "bad config: foo."])
def test_a_verdict_and_the_reason_to_give_up_are_two_sentences(
    start: Callable[..., Night], message: str
) -> None:
    """A full stop separates them, whether or not the exception's message ends with one."""
    night = start(budget=Budget(failures_without_progress=0))
    night.vote(7)
    night.poll()
    night.raised(0, type="ValueError", message=message)
    night.poll(night.ranks.exit(0, code=1))
    sentence = night.supervisor.sentence
    assert "bad config: foo. Gave up: " in sentence
    assert sentence.endswith("(budget 0).")


def test_a_second_stop_states_how_long_the_ranks_had(start: Callable[..., Night]) -> None:
    """Not the timeout, which has not passed."""
    night = start()
    night.supervisor.request_stop("SIGINT")
    night.supervisor.request_stop("SIGINT")
    night.poll()
    (text,) = [text for text in night.said if "did not stop" in text]
    assert "within 0 s of being asked to" in text


def test_a_stopped_run_is_shown_as_stopped(start: Callable[..., Night]) -> None:
    """In memory and in the journal: not as failed."""
    night = start()
    night.vote(7)
    night.supervisor.request_stop("SIGTERM")
    night.done(0, 1)
    night.poll(night.ranks.exit(0, code=75), night.ranks.exit(1, code=75))
    assert night.supervisor.status().state == read_status(night.directory).state == "stopped"


def test_a_run_that_has_ended_cannot_be_given_up(start: Callable[..., Night]) -> None:
    """A rank that survives SIGKILL after the stop changes nothing about the exit code; the user is told."""
    night = start()
    night.supervisor.request_stop("SIGTERM")
    night.supervisor.request_stop("SIGTERM")
    night.poll()
    night.supervisor.give_up("processes [901] survived SIGKILL for 10 s")
    assert (night.supervisor.exit_code, night.state) == (75, RunState.stopped)
    assert night.said[-1] == "processes [901] survived SIGKILL for 10 s"
    assert len(night.events("run_ended")) == 1


def test_the_journal_contains_only_lifecycle_events_that_happened(start: Callable[..., Night]) -> None:
    """A membership change is neither a fault nor evidence; a stop between attempts is no restart."""
    night = start()
    night.vote(7)
    night.poll()
    night.supervisor.membership_changed()
    night.attempt()
    night.vote(8)
    night.train(step=7)
    night.poll()
    night.poll(night.ranks.exit(1, signal=9))
    night.supervisor.stop_without_ranks("SIGTERM")
    changes = [(record["because"], record["to"]) for record in night.events("state_changed")]
    assert changes == [
        ("step_committed", "running"), ("membership_changed", "recovering"), ("restarted", "starting"),
        ("fault", "collecting"), ("evidence_written", "recovering"), ("stop_requested", "stopping"),
        ("stopped", "stopped"),
    ]  # fmt: skip
    assert night.supervisor.exit_code == 75


def test_giving_up_before_the_first_rank_writes_one_lifecycle_event(start: Callable[..., Night]) -> None:
    """No rank failed and no evidence was written."""
    night = start()
    night.supervisor.give_up("RendezvousTimeoutError: no second node")
    assert [record["because"] for record in night.events("state_changed")] == ["gave_up"]
