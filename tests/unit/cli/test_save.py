"""`grpo-run save`: write the request to the board."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support.identities import identity
from support.journal import event

from grpo_run.cli.main import main
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.checkpoints.manifest import write_manifest
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(run: RunDirectory) -> RunDirectory:
    """A run with a board, without a supervisor."""
    Board.create(run.board, 1)
    return run


class Writer(threading.Thread):
    """Plays a run: once a save is requested, write these events, with a checkpoint for each that is
    published.
    """

    def __init__(self, run: RunDirectory, *events: dict[str, Any], lock: int | None = None) -> None:
        super().__init__()
        self.run_directory, self.events, self.lock = run, events, lock
        self.requests_seen: list[int] = []
        self.start()

    def run(self) -> None:
        """Wait for the request, then write."""
        board, journal = Board.open(self.run_directory.board), Journal(self.run_directory.journal, "night")
        journal.attempt = 1
        for fields in self.events:
            seen = self.requests_seen[-1] if self.requests_seen else 0
            deadline = time.monotonic() + 30
            while fields.pop("asked", True) and board.requests[1] == seen and time.monotonic() < deadline:
                time.sleep(0.01)
            self.requests_seen.append(board.requests[1])
            if fields["event"] == "checkpoint_published":
                path, kept = Path(fields["path"]), fields.pop("kept")
                path.mkdir(parents=True)
                (path / "model").write_bytes(b"weights")
                write_manifest(path, identity(path.parent, fields["step"], kept=kept))
            journal.write(event(fields.pop("event"), train_call=1, **fields))
        if self.lock is not None:
            os.close(self.lock)


def published(here: Path, step: int, *, kept: bool, **fields: Any) -> dict[str, Any]:
    """The event of a checkpoint."""
    path = here / "out" / f"checkpoint-{step}"
    return {"event": "checkpoint_published", "step": step, "path": str(path), "kept": kept, **fields}


@pytest.mark.usefixtures("owned")
def test_wait_prints_the_path_of_the_checkpoint(run: RunDirectory, here: Path, capsys: Captured) -> None:
    """Of the one that was asked for, not of a scheduled one in between."""
    writer = Writer(run, published(here, 2, kept=False), published(here, 3, kept=True, asked=False))
    assert main(["save", "night", "--wait"]) == 0
    writer.join()
    assert capsys.readouterr().out == f"{here / 'out' / 'checkpoint-3'}\n"


@pytest.mark.usefixtures("owned")
def test_wait_asks_again_after_a_recovery(run: RunDirectory, here: Path, capsys: Captured) -> None:
    """The ranks that were started since do not know of the request."""
    writer = Writer(
        run,
        {"event": "attempt_started"},
        {"event": "step_committed", "step": 1, "asked": False},
        published(here, 3, kept=True),
    )
    assert main(["save", "night", "--wait", "60"]) == 0
    writer.join()
    assert writer.requests_seen[-1] == 2
    assert "checkpoint-3" in capsys.readouterr().out


@pytest.mark.usefixtures("owned")
def test_wait_exits_with_1_after_its_time(run: RunDirectory, capsys: Captured) -> None:
    """With the reason, if the journal has one."""
    writer = Writer(run, {"event": "checkpoint_failed", "reason": "the disk is full"})
    assert main(["save", "night", "--wait", "1"]) == 1
    writer.join()
    assert capsys.readouterr().out == "no checkpoint is on disk 1 s after the request: the disk is full\n"


def test_wait_ends_with_the_run(run: RunDirectory, owned: int, capsys: Captured) -> None:
    """Exit code 2: there will be no checkpoint."""
    Writer(run, {"event": "run_ended", "exit_code": 93}, lock=owned).join(0)
    assert main(["save", "night", "--wait"]) == 2
    assert "has ended before it saved" in capsys.readouterr().err
