"""A run whose first attempt trains, and what it collects as evidence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.supervised_run import SupervisedRun

from grpo_run.runtime.supervisor import incident
from grpo_run.watchdog.evidence import collection


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """The pids alive at each collection of evidence; no signal is sent."""
    calls: list[dict[int, int]] = []

    def collect(
        incident: Path, pids: dict[int, int], stacks: dict[int, Path], **more: Any
    ) -> collection.Collected:
        calls.append(dict(pids))
        return collection.Collected(missing=["rank 0: no stack within 0.15 s"], stacks={})

    monkeypatch.setattr(collection, "collect", collect)
    monkeypatch.setattr(incident, "GATHER_SECONDS", 0.001)
    return calls


@pytest.fixture
def start(tmp_path: Path, collected: list[dict[int, int]]) -> Callable[..., SupervisedRun]:
    """Start a run whose first attempt trains, and has committed a step if one is given."""

    def make(*, step: int = 0, **changes: Any) -> SupervisedRun:
        run = SupervisedRun(tmp_path / "run", **changes)
        run.attempt()
        run.train()
        if step:
            run.vote(step)
            run.poll()
        return run

    return make
