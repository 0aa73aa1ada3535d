"""Whose warning is said, and whose is only written down."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.trainers.rank.session import Session


@pytest.fixture
def rank(
    board: Board, make_settings: Callable[..., RankSettings], monkeypatch: pytest.MonkeyPatch
) -> Callable[[int], Session]:
    """The session of a rank of two, each on a node of its own."""

    def make(rank: int) -> Session:
        given = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        for name, value in given.items():
            monkeypatch.setenv(name, str(value))
        return Session(make_settings())

    return make


def test_what_all_ranks_warn_of_is_said_and_written_once(
    rank: Callable[[int], Session],
    events: Callable[[], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By rank 0, though every rank asks for it."""
    for number in (0, 1):
        rank(number).warn("the disk is slow")
    assert [(event["event"], event["rank"], event["text"]) for event in events()] == [
        ("warning", 0, "the disk is slow")
    ]
    assert capfd.readouterr().err == "grpo-run: the disk is slow\n"


def test_a_ranks_own_trouble_is_written_whichever_rank_it_is(
    rank: Callable[[int], Session],
    events: Callable[[], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Under its number, and without a line among what the script prints: here a collective that cannot be noted."""
    for number in (0, 1):
        group = type("ProcessGroup", (), {"barrier": lambda self: None})
        work = type("Work", (), {"wait": lambda self: None})
        rank(number).recorder.install(SimpleNamespace(ProcessGroup=group, Work=work))
        group().barrier()
    assert [(event["event"], event["rank"]) for event in events()] == [("warning", 0), ("warning", 1)]
    assert all("barrier could not be noted" in event["text"] for event in events())
    assert capfd.readouterr().err == ""
