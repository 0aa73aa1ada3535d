"""A failed rank costs an attempt: evidence is written, the next attempt begins afresh, and a repeated failure
ends the run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from support.builders.runtime.supervised_run import SupervisedRun
from support.journal import read_records

from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.processes.agent import Directive
from grpo_run.runtime.processes.ranks import RankGroup


def test_a_killed_rank_is_recovered_after_evidence_is_written(
    start: Callable[..., SupervisedRun], collected: list[dict[int, int]]
) -> None:
    """Fault, evidence of the ranks alive, verdict, decision, restart: the journal has this order."""
    run = start(step=7)
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.restart
    assert collected == [{0: 900}]
    assert run.state is RunState.recovering
    names = [record["event"] for record in read_records(run.directory.journal)]
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
    run = start(step=7)
    run.poll(run.ranks.exit(1, signal=9))
    run.attempt()
    assert run.supervisor.attempt.number == 1
    assert run.outputs[1, 1] == run.directory.path / "attempts" / "001" / "rank1.log"
    assert run.outputs[1, 1].parent.is_dir()
    assert run.state is RunState.starting
    assert run.poll() is Directive.monitor


def test_the_same_exception_at_the_same_step_is_restarted_once(start: Callable[..., SupervisedRun]) -> None:
    """Then the run is given up with code 93, a sentence and the traceback."""
    run = start(step=7)
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


def test_an_exception_before_the_first_step_ends_the_run(start: Callable[..., SupervisedRun]) -> None:
    """At once, as under torchrun."""
    run = start()
    run.attempt()
    run.raised(1)
    assert run.poll(run.ranks.exit(1, code=1)) is Directive.terminate
    assert run.supervisor.exit_code == 93
    assert run.events("incident")[0]["cause"] == "startup_failure"


def test_a_fault_before_the_first_poll_is_not_older_than_the_ranks(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor is made before the ranks: their start, which takes seconds, is no time to detect a
    fault.
    """
    run = start()
    started_at = time.time()
    monkeypatch.setattr(run.supervisor, "_polled_at", time.monotonic() - 60.0)
    run.supervisor.attempt_started(cast(RankGroup, run.ranks))
    run.poll(run.ranks.exit(1, signal=9))
    (record,) = run.events("incident")
    assert record["failed_at"] >= started_at - 0.1
    assert record["detection_seconds"] < 30.0
