"""Findings of several ranks and attempts are one finding, said once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.journal import event

from grpo_run.runtime.features.memory_trace import supervisor
from grpo_run.runtime.features.memory_trace.events import PART as HISTORY
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig

MakeConfig = Callable[..., RunConfig]
LINE = "5 tensors, held by list `a` (a.py:3)"


class Run:
    """The supervisor of a run on two ranks."""

    def __init__(self, config: RunConfig) -> None:
        directory = RunDirectory(path=Path(config.run_directory))
        directory.create()
        self.live = LiveHistory(directory.journal, "run-1", parts=[HISTORY()])
        self._said: list[str] = []
        reporter = Reporter(self.live, "", self._said.append)
        self.feature = supervisor.PART(config, directory, self.live.history, reporter)

    def found(self, rank: int = 0, attempt: int = 0, **fields: Any) -> None:
        """A rank has found a list that keeps tensors."""
        known = {
            "attempt": attempt, "step": 7, "world_size": 2, "tensors": 5, "key": "list `a` (a.py:3)",
            "sentence": LINE,
        }  # fmt: skip
        self.live.write(event("memory_finding", rank=rank, **(known | fields)))

    def said(self, *, final: bool = False) -> list[str]:
        """What is said now."""
        self._said.clear()
        if final:
            self.feature.end()
        else:
            self.feature.poll()
        return list(self._said)


@pytest.fixture
def run(make_config: MakeConfig) -> Run:
    """A new run."""
    return Run(make_config())


def test_a_finding_is_said_once_whichever_ranks_have_it(run: Run) -> None:
    """The status names all of them."""
    run.found(1)
    assert run.said() == [f"memory: rank 1: {LINE}"]
    run.found(0)
    assert run.said() == []
    run.found(0, key="dict `b`", sentence="6 tensors")
    assert run.said(final=True) == ["memory: rank 0: 6 tensors"]
    assert run.live.history.notes() == [f"memory: ranks 0 and 1: {LINE}", "memory: rank 0: 6 tensors"]


def test_a_finding_is_not_said_again_after_a_restart_of_ranks_or_supervisor(
    run: Run, make_config: MakeConfig
) -> None:
    """The number of attempts is shown by `status` and reports."""
    for attempt in (0, 2):
        run.found(0, attempt)
        run.found(1, attempt)
        assert len(run.said()) == (attempt == 0)
    assert run.live.history.notes() == [f"memory: ranks 0 and 1: {LINE} (found in 2 attempts)"]
    restarted = Run(make_config())
    restarted.found(attempt=3)
    assert restarted.said(final=True) == []


def test_findings_are_json_with_ranks_and_attempts(run: Run) -> None:
    """Nothing of the record's frame is repeated."""
    run.found()
    (part,) = run.live.history.parts
    assert json.loads(json.dumps(part.as_json()["memory_trace"]["findings"])) == [
        {"key": "list `a` (a.py:3)", "tensors": 5, "bytes": 0, "since_step": 0, "steps": 0, "sentence": LINE,
        "ranks": [0], "attempts": [0]}
    ]  # fmt: skip
