"""A failure of the supervisor itself stops the ranks in order, and is reported."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.builders.runtime.supervised_run import SupervisedRun
from support.journal import event

from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.processes.agent import Directive
from grpo_run.watchdog.diagnosis import fault
from grpo_run.watchdog.observation import Exit


def break_detector(run: SupervisedRun, error: Exception) -> None:
    """Let the next poll fail."""

    def scan(slots: object) -> None:
        raise error

    run.supervisor.detector.scan = scan  # type: ignore[method-assign, assignment]


def test_a_failure_of_the_supervisor_stops_the_ranks_in_order(start: Callable[..., SupervisedRun]) -> None:
    """The ranks save; the report has the traceback; one line names it; the run can be resumed."""
    run = start(step=3)
    run.ranks.later = [run.ranks.exit(0, code=75), run.ranks.exit(1, code=75)]
    Journal(run.directory.journal, "run-1").write(
        event("checkpoint_published", step=3, path="checkpoint-3", verified=True)
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
    assert "KeyError: 'rank' (test_own_failures.py:" in line
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
        monkeypatch.setattr(fault, "diagnose_exits", lambda *arguments, **options: 1 // 0)
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
    run = start(step=3)
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
        "grpo-run-output has failed; the run continues without it: RuntimeError: no memory"
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
