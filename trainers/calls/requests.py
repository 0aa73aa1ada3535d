"""Stop and save requests that the user makes through the board (`grpo-run stop`, `grpo-run save`, signals).

Polled by `step_vote.py` at every step. One rank may see a request a step before another, so a request takes
effect only after the vote has carried it to all ranks.
"""

from __future__ import annotations

from grpo_run.runtime.board.board import Board


class UserRequests:
    """Requests on this node's board that this rank has not put to a vote yet."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._saves_seen = board.requests[1]

    def poll(self) -> tuple[bool, bool]:
        """Return (stop requested, save requested since the last poll)."""
        stop, saves = self._board.requests
        save = saves > self._saves_seen
        self._saves_seen = saves
        return stop, save
