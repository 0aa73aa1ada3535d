"""Wait until the forkserver can fork. One that hangs in an import, or exits, is replaced by one that imports nothing.

Called by the supervisor before it starts ranks. A child of the replacement has nothing in memory that its script would
import, so it becomes a fresh interpreter (`trainers.bootstrap`). An import that raises does not end the server; its
children know of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from grpo_run.runtime import upstream
from grpo_run.runtime.processes import adoption, forkserver, termination
from grpo_run.watchdog.processes import read_stat

POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When a server that does not answer is given up."""

    idle_seconds: float = 30.0
    """An import that uses no CPU time for so long hangs: reading a file from a slow network takes less."""
    total_seconds: float = 300.0
    """Imports from a slow network take minutes; a fresh interpreter then finds the files in memory."""
    end_seconds: float = 10.0
    """How long a server may take to end after SIGKILL."""


LIMITS = Limits()
_awaited: int | None = None
"""Process id of the server that has answered."""


def await_server(warn: Callable[[str], None], limits: Limits = LIMITS) -> None:
    """Wait until this process's forkserver can fork; do nothing if there is none, or if it has been waited for.

    Args:
        warn: tells the user that the server was given up, and why.
        limits: when it is given up.
    """
    global _awaited
    server = upstream.forkserver_pid()
    if server is None or server == _awaited:
        return
    failures: list[BaseException] = []
    thread = threading.Thread(target=_fork_once, args=(failures,), name="grpo-run-forkserver", daemon=True)
    thread.start()
    reason = None
    progress = _Progress(server, limits)
    while thread.is_alive() and reason is None:
        thread.join(POLL_SECONDS)
        forkserver.continue_server()
        reason = progress.hang() if thread.is_alive() else None
    if failures and reason is None:
        reason = "the process that imports the libraries in advance has exited"
    if reason is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server, signal.SIGKILL)
        # not reaped: multiprocessing does that, and then starts another server
        termination.wait_for_exits([server], limits.end_seconds)
        stat = read_stat(server)
        if stat is not None and stat.is_alive:
            adoption.abandon_server()  # it sleeps in the kernel; the thread, a daemon, goes on waiting for its answer
        else:
            thread.join(limits.end_seconds)
        forkserver.replace_server()
    if reason is not None:
        warn(f"{reason}: ranks start as fresh interpreters")
    _awaited = upstream.forkserver_pid()


class _Progress:
    """Whether a server still imports.

    Args:
        pid: of the server.
        limits: when it is given up.
    """

    def __init__(self, pid: int, limits: Limits) -> None:
        self._pid = pid
        self._limits = limits
        self._cpu_seconds = 0.0
        self._began_at = self._active_at = time.monotonic()

    def hang(self) -> str | None:
        """Return why the server is given up; None to go on waiting."""
        now = time.monotonic()
        stat = read_stat(self._pid)
        if stat is not None and stat.cpu_seconds > self._cpu_seconds:
            self._cpu_seconds, self._active_at = stat.cpu_seconds, now
        if now - self._active_at > self._limits.idle_seconds:
            return f"an import of the libraries in advance did nothing for {self._limits.idle_seconds:.0f} s"
        if now - self._began_at > self._limits.total_seconds:
            return f"importing the libraries in advance took more than {self._limits.total_seconds:.0f} s"
        return None


def _fork_once(failures: list[BaseException]) -> None:
    """Let the server fork a process that exits at once. It answers after its imports only."""
    try:
        with upstream.hidden_main():
            process = multiprocessing.get_context("forkserver").Process(target=_nothing, daemon=False)
            process.start()
        process.join()
        process.close()
    except (OSError, EOFError) as error:
        failures.append(error)


def _nothing() -> None:
    """Run in a child that only shows that the server answers."""
