"""Ends a call in a rank's main thread that takes too long, by an exception that a signal raises there.

The function runs where it would run without us, so nothing changes for one that returns: threads, context
variables and connections are the same. The heartbeat's thread looks at the clock about once a second and
sends the signal to the main thread; a wait in the kernel, a sleep, a lock and a loop in Python end by it.
Code in C that neither returns nor lets signals be handled goes on; the hang detector then ends the attempt.
The exception is no `Exception`, so a tool's retries do not take it for a failure of their own. Called by
`_calls.py`.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from grpo_run.runtime.features.agent_tools._outages import CallEndedError
from grpo_run.watchdog.evidence.source import is_user_file

INTERRUPT = signal.SIGRTMIN + 12
"""Sent to the main thread only, and only while a call is overdue. Nobody else uses it by default."""
AGAIN_SECONDS = 5.0
"""Time until a call that has swallowed the exception gets the next."""


class _OverdueError(BaseException):
    """Raised in a call that has taken too long."""


@dataclass(eq=False)
class _Open:
    due_at: float
    interrupted: bool = False
    where: str = ""


class Interrupter:
    """Runs calls in the main thread and ends those that are overdue.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._open: _Open | None = None
        self._main = threading.main_thread().ident

    @contextmanager
    def armed(self) -> Iterator[bool]:
        """Handle the signal for the length of the block. False if nothing can be interrupted: the script uses
        the signal, or trains outside the main thread.
        """
        possible = threading.get_ident() == self._main and signal.getsignal(INTERRUPT) is signal.SIG_DFL
        if not possible:
            self._main = None
            yield False
            return
        signal.signal(INTERRUPT, self._handle)
        try:
            yield True
        finally:
            signal.signal(INTERRUPT, signal.SIG_IGN)  # one may be on its way
            signal.signal(INTERRUPT, signal.SIG_DFL)

    def beat(self) -> None:
        """Interrupt the open call if it is overdue. Called by another thread; never waits."""
        call, now = self._open, self._clock()
        if call is not None and self._main is not None and now >= call.due_at:
            call.interrupted = True
            call.due_at = now + AGAIN_SECONDS
            signal.pthread_kill(self._main, INTERRUPT)

    def run(self, limit_seconds: float, function: Callable[[], Any]) -> Any:
        """Call a function and return its result.

        Raises:
            CallEndedError: it was ended, whatever it made of that.
        """
        if math.isinf(limit_seconds) or threading.get_ident() != self._main:
            return function()
        outer = self._open
        call = _Open(self._clock() + limit_seconds)
        try:
            self._open = call
            try:
                result = function()
            finally:
                self._open = outer
        except _OverdueError:
            self._open = outer
        except Exception:
            if not call.interrupted:
                raise
        else:
            if not call.interrupted:
                return result
        raise CallEndedError(limit_seconds, "interrupted", call.where)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        call = self._open
        if call is None or not call.interrupted:
            return  # the call has returned meanwhile
        call.where = call.where or _line_of_script(frame)
        raise _OverdueError


def _line_of_script(frame: FrameType | None) -> str:
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
