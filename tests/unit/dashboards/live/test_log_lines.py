"""The log panel gets the newest lines, then what is added, and learns when no more can come."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_run.dashboards import rank_logs as module
from grpo_run.dashboards.rank_logs import Batch, log_lines
from grpo_run.runtime.history.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two attempts with two ranks."""
    made = RunDirectory(path=tmp_path / "night")
    made.create()
    for attempt in (0, 1):
        made.attempt(attempt).mkdir()
        for rank in (0, 1):
            say(made, attempt, rank, "one", "two", "Three\x1b[31m")
    return made


def say(run: RunDirectory, attempt: int, rank: int, *lines: str) -> None:
    """Print lines."""
    with open(run.attempt(attempt) / f"rank{rank}.log", "a") as file:
        file.writelines(f"{line}\n" for line in lines)


def texts(batch: Batch | None) -> list[tuple[int, int, str]]:
    """Attempt, rank and text of lines."""
    assert batch is not None
    return [(attempt, rank, text) for attempt, rank, _, text in batch]


def test_a_panel_follows_a_run_until_it_ends(run: RunDirectory) -> None:
    """Each line comes once; when the supervisor is gone, the last ones do."""
    descriptor = run.acquire()
    batch = log_lines(run, rank=None, attempt=None, find="")
    first = texts(batch())
    assert len(first) == 12
    assert first[0] == (0, 0, "one")
    assert not any("\x1b" in text for _, _, text in first)
    assert texts(batch()) == []
    say(run, 1, 1, "four")
    assert texts(batch()) == [(1, 1, "four")]
    os.close(descriptor)
    say(run, 1, 0, "five")
    assert texts(batch()) == [(1, 0, "five")]
    assert batch() is None


def test_one_rank_of_one_attempt_can_be_asked_for(run: RunDirectory) -> None:
    """Where a fault was: its last lines."""
    batch = log_lines(run, rank=1, attempt=0, find="")
    assert texts(batch()) == [(0, 1, "one"), (0, 1, "two"), (0, 1, "Three")]


def test_a_search_looks_at_all_lines(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a panel does not begin with, whatever the case."""
    monkeypatch.setattr(module, "FIRST_LINES", 1)
    assert len(log_lines(run, rank=None, attempt=None, find="")() or []) == 4
    assert texts(log_lines(run, rank=0, attempt=None, find="tHRee")()) == [(0, 0, "Three"), (1, 0, "Three")]


def test_of_very_many_lines_the_newest_are_sent(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page with all of them would not answer."""
    monkeypatch.setattr(module, "FIRST_LINES", 10_000)
    say(run, 1, 1, *map(str, range(5000)))
    found = texts(log_lines(run, rank=1, attempt=1, find="")())
    assert len(found) == module.MOST_LINES
    assert found[-1] == (1, 1, "4999")
