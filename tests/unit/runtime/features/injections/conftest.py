"""An empty log, and faults that only write to it."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from support.builders.trainers.injections import Log

from grpo_run.runtime.features.injections import rank
from grpo_run.runtime.features.injections._faults import KINDS


@pytest.fixture
def log() -> Log:
    """An empty log."""
    return Log()


@pytest.fixture
def logged_faults(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    """Replace the faults and the common collective by a line in the log."""
    for name, kind in KINDS.items():
        logged = replace(
            kind, effect=lambda context: log.lines.append(f"{context.text.split()[-1]} on {context.rank}")
        )
        monkeypatch.setitem(KINDS, name, logged)
    monkeypatch.setattr(
        rank, "common_collective", lambda context: log.lines.append(f"common on {context.rank}")
    )


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The lengths of all sleeps, which are skipped."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds
