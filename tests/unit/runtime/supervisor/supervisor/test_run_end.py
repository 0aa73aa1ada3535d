"""How a run ends that nobody stops: finished, failed, or given up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.builders.runtime.supervised_run import SupervisedRun
from support.journal import event

from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.processes.agent import Directive
from grpo_run.runtime.supervisor.detection import exit_hangs
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts
from grpo_run.watchdog.stalls.stall import Stall


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


def test_a_script_that_lacks_a_checkpoint_has_not_finished(
    start: Callable[..., SupervisedRun], tmp_path: Path
) -> None:
    """The last line names the checkpoint, the reason and the newest one; the script is not run again."""
    run = start(step=100)
    newest = tmp_path / "checkpoint-100"
    newest.mkdir()
    journal = Journal(run.directory.journal, "run-1")
    journal.write(
        event(
            "checkpoint_failed", rank=0, step=50, path="/out/checkpoint-50", train_call=1, reason="no room.",
            lost=True,
        )
    )  # fmt: skip
    journal.write(event("train_started", rank=0, train_call=1, step=0, target_steps=100))
    journal.write(
        event("checkpoint_published", rank=0, step=100, path=str(newest), train_call=1, scheduled=True)
    )
    run.finish(0)
    assert (run.supervisor.exit_code, run.state) == (93, RunState.failed)
    assert run.supervisor.sentence.endswith(
        "but /out/checkpoint-50, which the script scheduled, is not on disk: no room."
        f" Last checkpoint: {newest}."
    )
    history = run.supervisor.status().history
    assert (history.completed, history.finished) == (True, False)


@pytest.mark.parametrize(("required", "code"), [(False, 0), (True, 93)])
def test_a_script_that_leaves_out_what_was_interrupted_says_so(
    start: Callable[..., SupervisedRun], required: bool, code: int
) -> None:
    """Under --require-resume the run has failed."""
    run = start(require_resume=required)
    journal = Journal(run.directory.journal, "run-1")
    journal.attempt = 0
    journal.write(event("train_started", rank=0, train_call=1, step=0, trainer_class="T", output_dir="/out"))
    run.vote(7)
    run.poll()
    run.poll(run.ranks.exit(1, signal=9))
    run.attempt()
    run.finish(0)
    assert run.supervisor.exit_code == code
    assert "the script ended without continuing it" in run.supervisor.sentence
    assert len(run.events("warning")) == (0 if required else 1)


def test_a_signal_after_the_script_completed_is_a_warning(start: Callable[..., SupervisedRun]) -> None:
    """A library that crashes when the interpreter exits does not fail the run."""
    run = start()
    run.vote(100)
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=0))
    assert run.poll(run.ranks.exit(1, signal=11)) is Directive.finished
    assert "SIGSEGV" in run.events("warning")[0]["text"]
    assert run.events("incident") == []


def test_a_rank_that_does_not_exit_is_terminated_with_a_warning(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its deadline without activity. The run has finished."""
    monkeypatch.setattr(exit_hangs, "CHECK_SECONDS", 0.0)
    run = start(deadlines=DeadlineSettings(exit_seconds=1e-9))
    run.remaining = ExitFacts(states={0: "S"}, own={})
    run.vote(100)
    run.done(0, 1)
    deadline = time.monotonic() + 10.0
    while (directive := run.poll()) is Directive.monitor:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert directive is Directive.finished
    assert run.supervisor.exit_code == 0
    assert "did not exit" in run.events("warning")[0]["text"]


@pytest.mark.parametrize(("returned", "code"), [((0, 1), 0), ((0,), 93), ((), 93)])
def test_the_second_proof_of_a_hang_ends_the_run(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch, returned: tuple[int, ...], code: int
) -> None:
    """With 0 if every script has run its last line, else with 93. The first proof costs an attempt."""
    run = start()
    stuck = Stall(
        cause=Cause.no_progress, culprits=(0, 1), waiters=(), phase=Phase.idle, deadline_seconds=0.0,
        waited_seconds=6.0,
        lasts_seconds=math.inf, sentence="Ranks 0 and 1 wait for a thread that cannot end.",
        confidence="proved",
    )  # fmt: skip
    found = HangFinding(stall=stuck, began_at_seconds=time.monotonic())
    monkeypatch.setattr(run.supervisor.detector, "scan", lambda slots: found)
    for attempt in (1, 2):
        for rank, slot in run.slots.items():
            slot.state = RankState.returned if rank in returned else RankState.between
            slot.publish()
        directive = run.poll()
        if attempt == 1:
            assert directive is Directive.restart
            run.attempt()
    assert directive is (Directive.finished if code == 0 else Directive.terminate)
    assert run.supervisor.exit_code == code
    assert [event["action"] for event in run.events("action")] == ["restart", "stop"]


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
    assert RunReader(run.directory).read().state == "failed"
    assert run.supervisor.status().history.exit_code == 93


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
