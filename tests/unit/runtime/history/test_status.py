"""The status of a run, read from its directory."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.journal import event

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history import reader
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.observation import Phase, RankState


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that committed step 7 of 100, lost a rank, and continued to step 8."""
    directory = RunDirectory(path=tmp_path / "night")
    directory.create()
    directory.write_run({"run_id": "night"})
    journal = Journal(directory.journal, "night")
    journal.write(event("run_started"))
    journal.attempt = 0
    journal.write(event("attempt_started"))
    journal.write(event("train_started", rank=0, step=0, train_call=1, target_steps=100))
    journal.write(event("state_changed", **{"from": "starting", "to": "running"}))
    journal.write(event("step_committed", step=7, train_call=1))
    journal.write(event("checkpoint_published", step=5, train_call=1, path="out/checkpoint-5", verified=True))
    journal.write(event("incident", step=7, cause="signal", culprit=1, signature="s", detection_seconds=0.1))
    journal.write(event("action", action="restart"))
    journal.attempt = 1
    journal.write(event("attempt_started"))
    journal.write(event("train_started", rank=0, step=5, train_call=1, target_steps=100))
    journal.write(event("step_committed", step=8, train_call=1))
    return directory


@pytest.fixture
def owned(run: RunDirectory) -> Iterator[RunDirectory]:
    """The same run with a live supervisor."""
    lock = run.acquire()
    yield run
    os.close(lock)


def end(run: RunDirectory, code: int, sentence: str = "") -> None:
    """Write that the supervisor has ended the run."""
    journal = Journal(run.journal, "night")
    journal.attempt = 1
    journal.write(
        event(
            "state_changed", **{"from": "running", "to": {0: "finished", 75: "stopped"}.get(code, "failed")}
        )
    )
    journal.write(event("run_ended", exit_code=code, sentence=sentence))


def test_a_live_run_shows_its_position(owned: RunDirectory) -> None:
    """State, step, attempt, and recovered faults."""
    Board.create(owned.board, 1).writer(0, rank=0, pid=1, attempt=1)
    status = RunReader(owned).read()
    assert status.sentence == "Running at step 8 of 100, attempt 2, 1 fault recovered."
    assert status.supervisor_pid == os.getpid()
    assert [slot is not None for slot in status.slots] == [True]


def test_a_run_whose_supervisor_vanished_is_unknown(run: RunDirectory) -> None:
    """Not running, although `running` is the last state in the journal. The board shows ranks that no longer
    exist.
    """
    Board.create(run.board, 1).writer(0, rank=0, pid=1, attempt=1)
    status = RunReader(run).read()
    assert status.state == status.as_json()["state"] == "unknown"
    assert status.sentence.startswith("Unknown: the supervisor exited")
    assert status.slots == ()


def test_the_json_object_has_every_rank(owned: RunDirectory) -> None:
    """What it does and for how long; a rank that cannot be observed is listed as such, with its process."""
    journal = Journal(owned.journal, "night")
    for rank, pid in enumerate((17, 18)):
        journal.write(event("rank_started", rank=rank, pid=pid))
    writer = Board.create(owned.board, 2).writer(0, rank=0, pid=17, attempt=1)
    writer.state, writer.step = RankState.training, 8
    writer.enter(Phase.reward)
    writer.publish()
    shown, unseen = RunReader(owned).read().as_json()["ranks"]
    assert (shown["rank"], shown["pid"], shown["step"], shown["state"]) == (0, 17, 8, "training")
    assert shown["phase"] == "reward"
    assert 0 <= shown["phase_seconds"] < 60
    assert 0 <= shown["seconds_since_progress"] < 60
    assert unseen == {"local_rank": 1, "observable": False, "pid": 18}


def test_a_board_that_shows_nothing_is_no_error(owned: RunDirectory) -> None:
    """The rest of the status is available. A rank that cannot be observed is not omitted."""
    Board.create(owned.board, 2)
    assert RunReader(owned).read().slots == (None, None)
    owned.board.write_bytes(b"x")
    assert RunReader(owned).read().slots == ()


@pytest.mark.parametrize(
    ("code", "said", "sentence"),
    [
        (0, "", "Finished at step 8 of 100, 1 fault recovered."),
        (75, "", "Stopped at step 8 of 100 (checkpoint at step 5). Run the same command to resume."),
        (93, "Rank 1 raised KeyError. Gave up: again.", "Rank 1 raised KeyError. Gave up: again."),
        (93, "", "Gave up at step 8 of 100."),
    ],
)
def test_an_ended_run_shows_how_it_ended(run: RunDirectory, code: int, said: str, sentence: str) -> None:
    """Sentence, exit code and state."""
    end(run, code, said)
    status = RunReader(run).read()
    assert (status.sentence, status.as_json()["exit_code"]) == (sentence, code)
    assert status.state == {0: "finished", 75: "stopped"}.get(code, "failed")


def test_the_json_object_has_the_documented_keys(run: RunDirectory) -> None:
    """Every value is JSON."""
    value = RunReader(run).read().as_json()
    keys = (
        "run_id state step target_steps step_seconds remaining_seconds ranks attempts goodput checkpoint"
        " recoveries sentence exit_code"
    )
    assert set(keys.split()) <= set(value)
    assert json.loads(json.dumps(value)) == value
    assert value["checkpoint"] == {"step": 5, "path": "out/checkpoint-5", "verified": True}
    assert 0 <= value["goodput"] <= 1
    (recovery,) = value["recoveries"]  # whose `rank` is the one culprit
    assert (recovery["rank"], recovery["lost_steps"], recovery["action"]) == (1, 2, "restart")


@pytest.mark.parametrize("exists", [True, False])
def test_a_snapshot_is_shown_only_while_its_memory_exists(run: RunDirectory, exists: bool) -> None:
    """The memory may have been freed since, or the machine started again."""
    memory = run.path / "memory"
    run.write_run({"run_id": "night", "snapshot_directory": str(memory)})
    journal = Journal(run.journal, "night")
    journal.write(event("checkpoint_staged", rank=0, step=8, train_call=1))
    if exists:
        memory.mkdir()
    assert RunReader(run).read().as_json()["snapshot_step"] == (8 if exists else None)


@pytest.mark.parametrize(
    ("committed", "silent_seconds", "behind"), [(40, 60.0, True), (9, 60.0, False), (40, 1.0, False)]
)
def test_steps_that_the_journal_lacks_are_reported(
    owned: RunDirectory, monkeypatch: pytest.MonkeyPatch, committed: int, silent_seconds: float, behind: bool
) -> None:
    """The disk is full, and the board shows later steps. The newest step may not have been polled yet."""
    board = Board.create(owned.board, 2)
    board.begin_attempt(1)
    for place in (0, 1):
        writer = board.writer(place, rank=place, pid=os.getpid(), attempt=1)
        writer.train_call, writer.committed_step = 1, committed
        writer.publish()
    now = time.time() + silent_seconds
    monkeypatch.setattr(reader, "time", SimpleNamespace(time=lambda: now))
    found = RunReader(owned).read()
    assert ("journal is behind" in found.sentence) is behind
    assert (f"step {committed}" in found.sentence) is behind
    assert "step 8 of 100" in found.sentence
