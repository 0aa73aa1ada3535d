"""A disk that refuses, or a file that is incomplete, changes no decision."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from support.builders.runtime.supervised_run import SupervisedRun

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.processes.agent import Directive
from grpo_run.watchdog.evidence import collection


def test_events_that_the_disk_refuses_count(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, the budget still ends a loop of failures, and the user is notified."""
    run = start(step=7, budget=Budget(failures_without_progress=1))
    write = os.write

    def no_events(descriptor: int, data: bytes) -> int:
        if data.lstrip().startswith(b'{"event"'):
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
        run.supervisor.begin(world_size_local=2, accept_change=False)


def full(descriptor: int, data: bytes) -> int:
    """Raise what `write` raises on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_does_not_prevent_the_recovery(
    start: Callable[..., SupervisedRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict names the evidence that could not be written."""

    def full(*arguments: object, **more: object) -> collection.Collected:
        raise OSError(28, "No space left on device")

    run = start(step=7)
    monkeypatch.setattr(collection, "collect", full)
    assert run.poll(run.ranks.exit(1, signal=9)) is Directive.restart
    verdict = json.loads((Path(run.events("incident")[0]["incident"]) / "verdict.json").read_text())
    assert "No space left" in verdict["missing_evidence"][0]


def test_a_truncated_error_file_does_not_prevent_a_verdict(start: Callable[..., SupervisedRun]) -> None:
    """The verdict names the exit code."""
    run = start(step=7)
    run.supervisor.attempt.files.error(0).write_text('{"type": "KeyEr')
    assert run.poll(run.ranks.exit(0, code=1)) is Directive.restart
    assert "exited with code 1" in run.events("incident")[0]["sentence"]


def test_an_exception_with_lone_surrogates_does_not_prevent_the_recovery(
    start: Callable[..., SupervisedRun],
) -> None:
    """Its message may quote an invalid token."""
    run = start(step=7)
    run.raised(0, message="cannot parse '\udc80'")
    assert run.poll(run.ranks.exit(0, code=1)) is Directive.restart
