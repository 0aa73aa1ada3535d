"""Requests to stop that arrive through the board, from where the supervisor cannot be signaled: another
container.

`grpo-run stop` counts a request up and waits until it is taken. A thread of the supervisor takes it and
delivers it as a signal would be, so that every wait of the supervisor is interrupted alike. Does not stop
anything itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from grpo_run.runtime.board.board import Board

POLL_SECONDS = 0.25
ANSWER_SECONDS = 15.0
"""How long `ask` waits. The thread polls every `POLL_SECONDS`; a loaded machine, or one that starts ranks,
takes longer.
"""


class StopRequests:
    """Takes requests while a run is supervised.

    Args:
        board: returns the present board of the run.
        deliver: called once per request, in a thread of its own.
    """

    def __init__(self, board: Callable[[], Board], deliver: Callable[[], None]) -> None:
        self._board = board
        self._deliver = deliver
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="grpo-run-stop")

    def start(self) -> None:
        """Start to take requests."""
        self._thread.start()

    def end(self) -> None:
        """Take no further request."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            board = self._board()
            if board.has_full_size and board.take_stop():
                self._deliver()


def ask(path: Path) -> bool:
    """Ask for a stop, and return whether the supervisor has taken the request.

    Args:
        path: of the board. A supervisor that is starting replaces it; then the request is repeated.

    Raises:
        RunDirectoryError: the board cannot be written.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    asked: Board | None = None
    number = 0
    while True:
        board = Board.open(path, writable=True)
        if asked is None or board.created_ns != asked.created_ns:
            asked, number = board, board.ask_to_stop()
        if asked.stops_taken >= number:
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_SECONDS)
