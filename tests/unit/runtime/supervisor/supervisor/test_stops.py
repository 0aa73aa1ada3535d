"""A stop is obeyed in every state, and the ranks have the time that they need to save."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.builders.runtime.supervised_run import SupervisedRun

from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.processes.agent import Directive
from grpo_run.watchdog.observation import RankState


@pytest.mark.parametrize("when", ["in a step", "during a recovery", "before nodes join", "on another node"])
def test_ranks_that_have_agreed_to_stop_end_the_run_with_code_75(
    start: Callable[..., SupervisedRun], when: str
) -> None:
    """The request is on the board, also on that of the next attempt. Memory and journal agree on the state:
    the run has not failed, and can be resumed.
    """
    run = start(step=7)
    if when == "during a recovery":
        run.poll(run.ranks.exit(1, signal=9))
    if when != "on another node":
        run.supervisor.request_stop("SIGTERM")
        assert run.state is RunState.stopping
    if when == "before nodes join":
        run.supervisor.membership_changed()
    if when in ("during a recovery", "before nodes join"):
        run.attempt()
    assert bool(run.supervisor.board.requests[0]) is (when != "on another node")
    run.done(0, 1)
    run.poll(run.ranks.exit(0, code=75))
    assert run.poll(run.ranks.exit(1, code=75)) is Directive.stopped
    assert (run.supervisor.exit_code, run.state) == (75, RunState.stopped)
    assert run.supervisor.status().state == RunReader(run.directory).read().state == "stopped"
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
    """The second request terminates them at once, and it is said how long they had; earlier checkpoints
    remain.
    """
    run = start(step=1)
    run.supervisor.request_stop("SIGTERM")
    assert run.poll() is Directive.monitor
    run.supervisor.request_stop("SIGINT")
    assert run.poll() is Directive.terminate
    assert collected == [{0: 900, 1: 901}]
    assert run.supervisor.exit_code == 75
    (text,) = [text for text in run.messages if "did not stop" in text]
    assert "within 0 s after the stop request" in text


def test_a_failure_while_stopping_is_not_restarted(start: Callable[..., SupervisedRun]) -> None:
    """The user wants the run to end."""
    run = start()
    run.vote(7)
    run.supervisor.request_stop("SIGINT")
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.terminate
    assert run.supervisor.exit_code == 75


def test_a_second_stop_terminates_ranks_that_are_starting(start: Callable[..., SupervisedRun]) -> None:
    """The first request came between two attempts. The exit code is 75."""
    run = start(step=7)
    run.poll(run.ranks.exit(1, signal=9))
    run.supervisor.request_stop("SIGINT")
    run.attempt()
    assert run.state is RunState.stopping
    run.supervisor.request_stop("SIGINT")
    assert run.poll() is Directive.terminate
    assert run.supervisor.exit_code == 75


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


def test_a_job_that_was_suspended_after_the_request_may_still_save(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which the supervisor did not run does not count towards the deadline."""
    run = start(step=3)
    run.supervisor.request_stop("SIGTERM")
    assert run.poll() is Directive.monitor
    suspended_until = time.monotonic() + run.supervisor.config.timeouts.stop_seconds + 60.0
    monkeypatch.setattr(time, "monotonic", lambda: suspended_until)
    assert run.poll() is Directive.monitor
    assert run.supervisor.exit_code is None
