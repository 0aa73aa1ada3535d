"""The user's stop and save requests, as one rank polls them from the board."""

from __future__ import annotations

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.step.step_vote import UserRequests


def test_save_requests_before_the_attempt_are_not_reported(board: Board) -> None:
    """The previous attempt has seen them."""
    board.request_save()
    assert UserRequests(board).poll() == (False, False)
