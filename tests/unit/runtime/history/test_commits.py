"""A step is committed when all ranks have voted after it, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.history.progress import Commit, newest_commit
from grpo_run.watchdog.observation import Slot


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """A board for two ranks."""
    return Board.create(tmp_path / "board.mmap", 2)


@pytest.fixture
def writers(board: Board) -> list[SlotWriter]:
    """Both ranks have voted on step 5 of their first call, and know that step 4 is committed."""
    made = [board.writer(rank, rank=rank, pid=1, attempt=0) for rank in (0, 1)]
    for rank, writer in enumerate(made):
        writer.train_call, writer.voted_step, writer.committed_step = 1, 5, 4
        writer.resumed_step, writer.target_steps = 3, 100
        writer.voted_at_ns = (10 + rank) * 10**9
        writer.publish()
    return made


def slots(board: Board) -> dict[int, Slot | None]:
    """Return the slots by rank."""
    return dict(enumerate(board.read_all()))


def test_a_step_all_ranks_voted_on_is_committed(board: Board, writers: list[SlotWriter]) -> None:
    """The time of the commit is that of the last vote."""
    expected = Commit(train_call=1, step=5, resumed_step=3, target_steps=100, voted_at_seconds=11.0)
    assert newest_commit(slots(board), 2) == expected


@pytest.mark.parametrize(
    ("changes", "world_size", "step"),
    [
        ({0: {"voted_step": 6}}, 2, 5),  # the slowest rank determines the step
        # ranks on other nodes may not have begun the vote: one local rank that knows its result is enough
        ({1: {"committed_step": 5}}, 4, 5),
        ({}, 4, 4),
        ({1: {"train_call": 2}}, 2, None),  # their steps are not comparable
        ({rank: {"train_call": 0, "voted_step": 0} for rank in (0, 1)}, 2, None),  # before the first call
    ],
)
def test_the_newest_step_that_all_ranks_have_voted_on_is_committed(
    board: Board,
    writers: list[SlotWriter],
    changes: dict[int, dict[str, int]],
    world_size: int,
    step: int | None,
) -> None:
    """Never one that a rank may not have voted on."""
    for rank, fields in changes.items():
        for name, value in fields.items():
            setattr(writers[rank], name, value)
        writers[rank].publish()
    commit = newest_commit(slots(board), world_size)
    assert (commit.step if commit is not None else None) == step


def test_an_unreadable_slot_prevents_a_commit(board: Board, writers: list[SlotWriter]) -> None:
    """Its rank may not have voted."""
    assert newest_commit({0: board.read(0), 1: None}, 2) is None
    assert newest_commit({}, 2) is None
