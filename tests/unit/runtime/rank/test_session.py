"""Which warnings of a rank are printed, and which are only journaled."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank.error_report import write_error
from grpo_run.runtime.rank.session import Session

Make = Callable[[int], Session]
Events = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def rank(
    board: Board, make_settings: Callable[..., RankSettings], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Session]:
    """Make the session of one of two ranks, each on its own node."""

    def make(rank: int) -> Session:
        given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        return Session(make_settings())

    return make


def test_a_warning_of_all_ranks_is_printed_and_journaled_once(
    rank: Make, events: Events, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every rank calls `warn`; rank 0 prints and journals."""
    for number in (0, 1):
        rank(number).warn("the disk is slow")
    assert [(event["event"], event["rank"], event["text"]) for event in events()] == [
        ("warning", 0, "the disk is slow")
    ]
    assert capfd.readouterr().err == "grpo-run: the disk is slow\n"


def test_a_warning_of_one_rank_is_journaled_by_that_rank(
    rank: Make, events: Events, capfd: pytest.CaptureFixture[str]
) -> None:
    """Under its number, without a printed line. The warning here is of a collective that cannot be logged."""
    for number in (0, 1):
        group = type("ProcessGroup", (), {"barrier": lambda self: None})
        work = type("Work", (), {"wait": lambda self: None})
        rank(number).recorder.install(SimpleNamespace(ProcessGroup=group, Work=work))
        group().barrier()
    assert [(event["event"], event["rank"]) for event in events()] == [("warning", 0), ("warning", 1)]
    assert all("barrier could not be logged" in event["text"] for event in events())
    assert capfd.readouterr().err == ""


def test_a_forked_process_is_not_the_rank(
    rank: Make, events: Events, capfd: pytest.CaptureFixture[str]
) -> None:
    """It prints, journals and reports nothing for the rank, and has no session."""
    session = rank(0)
    pid = os.fork()
    if pid == 0:
        session.warn("from the child")
        write_error(session, ValueError("of the child"))
        os._exit(int(session.is_rank))
    assert os.waitpid(pid, 0)[1] == 0
    assert session.is_rank
    assert events() == []
    assert capfd.readouterr().err == ""
    assert not os.path.exists(session.settings.error)
