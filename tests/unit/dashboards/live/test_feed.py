"""A run is read once for all pages, and a page that has the changes has the run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.journal import event

from grpo_run.dashboards.live.feed import RunFeed, RunList, key_of
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.observation import Phase


def make_run(root: Path, name: str = "night") -> tuple[RunDirectory, Journal]:
    """A run that has begun, with a journal to write to."""
    run = RunDirectory(path=root / name)
    run.create()
    run.write_run({"run_id": name})
    journal = Journal(run.journal, name)
    journal.write(event("run_started"))
    journal.write(event("train_started", rank=0, step=0, train_call=1, target_steps=9000))
    return run, journal


def log(journal: Journal, *steps: int) -> None:
    """Log and commit steps."""
    for step in steps:
        journal.write(event("step_logged", rank=0, step=step, train_call=1, reward=step / 10))
        journal.write(event("step_committed", step=step, train_call=1))


def poll(feed: RunFeed) -> dict[str, Any]:
    """Read the run, and return what has changed."""
    feed.read()
    return feed.changes()


def merged(curves: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The points that a page has after a change, as its script computes them."""
    return {
        name: [*curves.get(name, [])[: change["from"][name]], *added]
        for name, added in change["points"].items()
    }


def test_a_page_that_applies_the_changes_has_all_points(tmp_path: Path) -> None:
    """Also when a restart removes steps, and when the points are drawn in wider groups."""
    run, journal = make_run(tmp_path)
    feed = RunFeed(run)
    curves: dict[str, Any] = {}
    largest = 0
    for begin in range(0, 1500, 100):
        log(journal, *range(begin + 1, begin + 101))
        if begin == 700:
            journal.write(event("train_started", rank=0, step=720, train_call=1, target_steps=9000))
        change = poll(feed)["curves"]
        curves = merged(curves, change)
        assert curves == feed.shown["curves"]["points"]
        if begin < 500:
            largest = max(largest, len(change["points"]["reward"]))
    assert largest == 100


def test_nothing_is_sent_of_a_run_in_which_nothing_happens(tmp_path: Path) -> None:
    """Its goodput is that of its last event."""
    run, journal = make_run(tmp_path)
    log(journal, 1, 2)
    feed = RunFeed(run)
    assert set(poll(feed)) == {"run", "curves", "layout"}
    assert poll(feed) == {}


def test_phases_of_ranks_become_lanes(tmp_path: Path) -> None:
    """A span is sent while it is open, and once more when it has ended."""
    run, journal = make_run(tmp_path)
    with open(run.lock, "wb"):
        pass
    descriptor = run.acquire()
    board = Board.create(run.board, slots=1)
    writer = board.writer(0, rank=3, pid=os.getpid(), attempt=0)
    now = [0.0]
    feed = RunFeed(run, monotonic=lambda: now[0])

    now[0] = time.monotonic()
    writer.enter(Phase.generate)
    lanes = poll(feed)["lanes"]["ranks"]["3"]
    assert [(name, end) for name, _, end in lanes] == [("generate", None)]
    writer.leave(Phase.generate)
    writer.enter(Phase.reward)
    now[0] = time.monotonic() + 1.0  # a machine may be so fast that it is the same millisecond
    lanes = poll(feed)["lanes"]["ranks"]["3"]
    assert [name for name, _, _ in lanes] == ["generate", "reward"]
    assert lanes[0][2] == lanes[1][1]
    assert feed.shown["run"]["live"]
    os.close(descriptor)
    journal.write(event("run_ended", exit_code=75))
    assert "lanes" not in poll(feed)
    assert list(feed.shown["lanes"]["ranks"]) == ["3"]


def test_a_directory_that_cannot_be_read_is_a_problem_that_passes(tmp_path: Path) -> None:
    """Said once."""
    run, _ = make_run(tmp_path)
    feed = RunFeed(run)
    text = run.run_json.read_text()
    run.run_json.write_text("{")
    assert "run.json" in poll(feed)["problem"]
    assert poll(feed) == {}
    run.run_json.write_text(text)
    assert "run" in poll(feed)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunList:
    """A list of two runs, the newer one first, and of no others."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for age, name in ((100, "old"), (50, "new")):
        run, _ = make_run(tmp_path / "runs", name)
        os.utime(run.journal, (1e9 - age, 1e9 - age))
    return RunList(tmp_path / "runs")


def test_runs_are_listed_before_they_are_read(runs: RunList, tmp_path: Path) -> None:
    """What is watched anyway is not read; what has not changed is not read again."""
    runs.find()
    assert [(one["run_id"], one["state"]) for one in runs.shown()] == [("new", None), ("old", None)]
    key = key_of(tmp_path / "runs" / "old")
    runs.read({key: None}, 60.0)
    assert [one["state"] for one in runs.shown()] == ["unknown", None]
    runs.read({}, 60.0)
    assert [one["state"] for one in runs.shown()] == ["unknown", "unknown"]
    watched = {"run_id": "old", "state": "running", "step": 3, "target_steps": 4, "last_event_at": 1.0}
    runs.read({key: watched | {"incidents": [1, 2]}}, 0.0)
    assert [(one["state"], one.get("faults")) for one in runs.shown()] == [("unknown", 0), ("running", 2)]


def test_a_run_that_changes_is_read_again(runs: RunList, tmp_path: Path) -> None:
    """And comes first; a directory that is gone is no longer listed."""
    runs.find()
    runs.read({}, 60.0)
    Journal(tmp_path / "runs" / "old" / "journal.jsonl", "old").write(event("run_ended", exit_code=0))
    (tmp_path / "runs" / "new" / "run.json").unlink()
    runs.find()
    runs.read({}, 60.0)
    assert [(one["run_id"], one["state"]) for one in runs.shown()] == [("old", "finished")]


def test_a_run_that_is_given_is_listed_wherever_it_is(
    tmp_path: Path, make_status: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy has no entry in the registry."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    run, _ = make_run(tmp_path / "copies")
    runs = RunList(tmp_path / "runs", run)
    runs.find()
    assert list(runs.directories) == [key_of(run.path)]


def test_the_end_of_a_run_is_urgent_and_a_step_is_not(tmp_path: Path) -> None:
    """What came between two calls of `changes` is sent at once, or waits; nothing is lost."""
    run, journal = make_run(tmp_path)
    feed = RunFeed(run)
    poll(feed)
    journal.write(event("step_committed", step=50, train_call=1))
    feed.read()
    assert not feed.urgent
    journal.write(event("run_ended", exit_code=0, completed=True, stopped=False))
    feed.read()
    assert (feed.urgent, feed.changes()["run"]["step"], feed.urgent) == (True, 50, False)
