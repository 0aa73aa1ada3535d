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


def test_a_step_that_one_rank_has_not_voted_on_is_not_committed(
    board: Board, writers: list[SlotWriter]
) -> None:
    """The slowest rank determines the step."""
    writers[0].voted_step = 6
    writers[0].publish()
    commit = newest_commit(slots(board), 2)
    assert commit is not None
    assert commit.step == 5


def test_with_ranks_on_other_nodes_the_result_of_the_vote_counts(
    board: Board, writers: list[SlotWriter]
) -> None:
    """Other nodes may not have begun the vote. One local rank that knows its result is enough."""
    writers[1].committed_step = 5
    writers[1].publish()
    commit = newest_commit(slots(board), 4)
    assert commit is not None
    assert commit.step == 5
    writers[1].committed_step = 4
    writers[1].publish()
    commit = newest_commit(slots(board), 4)
    assert commit is not None
    assert commit.step == 4


def test_an_unreadable_slot_prevents_a_commit(board: Board, writers: list[SlotWriter]) -> None:
    """Its rank may not have voted."""
    assert newest_commit({0: board.read(0), 1: None}, 2) is None
    assert newest_commit({}, 2) is None


def test_ranks_in_different_train_calls_have_no_commit(board: Board, writers: list[SlotWriter]) -> None:
    """Their steps are not comparable."""
    writers[1].train_call = 2
    writers[1].publish()
    assert newest_commit(slots(board), 2) is None


def test_before_the_first_train_call_there_is_no_commit(board: Board, writers: list[SlotWriter]) -> None:
    """Step 0 is not a step."""
    for writer in writers:
        writer.train_call = writer.voted_step = 0
        writer.publish()
    assert newest_commit(slots(board), 2) is None
