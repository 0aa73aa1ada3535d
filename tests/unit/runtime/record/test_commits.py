"""A step is committed when all ranks have voted after it, and not a moment before."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.board.board import Board, SlotWriter
from grpo_run.runtime.record.commits import Commit, newest_commit
from grpo_run.watchdog.observation import Slot


@pytest.fixture
def board(tmp_path: Path) -> Board:
    """Two ranks' board."""
    return Board.create(tmp_path / "board.mmap", 2)


@pytest.fixture
def writers(board: Board) -> list[SlotWriter]:
    """Both have voted on step 5 of their first call, and know of step 4."""
    made = [board.writer(rank, rank=rank, pid=1, attempt=0) for rank in (0, 1)]
    for rank, writer in enumerate(made):
        writer.train_call, writer.voted_step, writer.committed_step = 1, 5, 4
        writer.resumed_step, writer.target_steps = 3, 100
        writer.voted_at_ns = (10 + rank) * 10**9
        writer.touch()
    return made


def slots(board: Board) -> dict[int, Slot | None]:
    """By rank."""
    return dict(enumerate(board.read_all()))


def test_a_step_all_ranks_voted_on_is_committed(board: Board, writers: list[SlotWriter]) -> None:
    """At the moment the last of them did."""
    expected = Commit(train_call=1, step=5, resumed_step=3, target_steps=100, voted_at_seconds=11.0)
    assert newest_commit(slots(board), 2) == expected


def test_a_step_one_rank_has_not_voted_on_is_not(board: Board, writers: list[SlotWriter]) -> None:
    """The slowest decides."""
    writers[0].voted_step = 6
    writers[0].touch()
    commit = newest_commit(slots(board), 2)
    assert commit is not None
    assert commit.step == 5


def test_with_ranks_elsewhere_only_the_vote_itself_tells(board: Board, writers: list[SlotWriter]) -> None:
    """Begun here is not begun there: what a rank was told by its vote counts, and one rank's word is enough."""
    writers[1].committed_step = 5
    writers[1].touch()
    commit = newest_commit(slots(board), 4)
    assert commit is not None
    assert commit.step == 5
    writers[1].committed_step = 4
    writers[1].touch()
    commit = newest_commit(slots(board), 4)
    assert commit is not None
    assert commit.step == 4


def test_a_rank_that_cannot_be_read_commits_nothing(board: Board, writers: list[SlotWriter]) -> None:
    """It may be the one that has not voted."""
    assert newest_commit({0: board.read(0), 1: None}, 2) is None
    assert newest_commit({}, 2) is None


def test_ranks_in_different_calls_commit_nothing(board: Board, writers: list[SlotWriter]) -> None:
    """Their steps do not count the same thing."""
    writers[1].train_call = 2
    writers[1].touch()
    assert newest_commit(slots(board), 2) is None


def test_before_the_first_call_nothing_is_committed(board: Board, writers: list[SlotWriter]) -> None:
    """Step 0 of no call is no step."""
    for writer in writers:
        writer.train_call = writer.voted_step = 0
        writer.touch()
    assert newest_commit(slots(board), 2) is None
