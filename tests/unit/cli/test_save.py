"""`grpo-run save`: write the request to the board."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_run.cli.main import main
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.record.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(here: Path) -> RunDirectory:
    """A run with a board, without a supervisor."""
    directory = RunDirectory(path=here / "runs" / "night")
    directory.create()
    directory.write_run({"run_id": "night"})
    Board.create(directory.board, 1)
    return directory


def test_the_request_is_written_to_the_board(run: RunDirectory, capsys: Captured) -> None:
    """Each command adds one request and requests no stop."""
    lock = run.acquire()
    assert main(["save", "night"]) == 0
    assert main(["save"]) == 0
    os.close(lock)
    assert Board.open(run.board).requests == (False, 2)
    assert "checkpoint" in capsys.readouterr().out


def test_an_inactive_run_is_refused(run: RunDirectory, capsys: Captured) -> None:
    """The next supervisor must not find an old request."""
    assert main(["save", "night"]) == 2
    assert "no run is active" in capsys.readouterr().err
    assert Board.open(run.board).requests == (False, 0)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", [[], ["no-such-run"]])
def test_an_unknown_run_is_refused(capsys: Captured, words: list[str]) -> None:
    """Exit code 2 and one line with the name."""
    assert main(["save", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("grpo-run: ")
    assert shown.count("\n") == 1
