"""The user's stop and save requests, as one rank polls them from the board."""

from __future__ import annotations

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.rank.step.step_vote import UserRequests


def test_a_save_request_is_reported_once(board: Board, requests: UserRequests) -> None:
    """Two requests between two polls are one request: both ask for the next checkpoint."""
    assert requests.poll() == (False, False)
    board.request_save()
    board.request_save()
    assert requests.poll() == (False, True)
    assert requests.poll() == (False, False)


def test_save_requests_before_the_attempt_are_not_reported(board: Board) -> None:
    """The previous attempt has seen them."""
    board.request_save()
    assert UserRequests(board).poll() == (False, False)


def test_a_stop_request_persists(board: Board, requests: UserRequests) -> None:
    """It is reported at every poll until the run has stopped."""
    board.request_stop()
    assert requests.poll() == (True, False)
    assert requests.poll() == (True, False)
