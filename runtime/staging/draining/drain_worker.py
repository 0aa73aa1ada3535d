"""The drain worker, a separate process that drains snapshots on request, and the handle to it.

Only this process writes checkpoints for the supervisor, so a file system that hangs blocks nothing else. It
dies with the supervisor; partial directories it leaves are deleted by the next drain. `DrainProcess` is the
supervisor's side, used by `drain_requests.py`; `serve` is the process itself. What it does for one request
is in `drain.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import setproctitle

from grpo_run.runtime import upstream
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.adoption import abandon
from grpo_run.runtime.processes.parent_death import die_with_parent
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.draining.drain import handle_request
from grpo_run.runtime.staging.draining.drain_messages import DrainProgress, DrainReply, DrainRequest

NICENESS = 10
"""Lower priority than training."""
PROGRESS_SECONDS = 0.5
"""Minimum time between two progress messages."""
IO_POLL_SECONDS = 5.0
"""Time between two checks of the kernel's I/O counters; much shorter than `drain_requests.STALL_SECONDS`."""


class DrainProcess:
    """The drain worker process of one run. It is started by the first request and again after it died.

    Args:
        staging_path: the run's staging area.
        preloaded: fork the process from the forkserver that has imported torch, instead of spawning it.
    """

    def __init__(self, staging_path: Path, *, preloaded: bool) -> None:
        self._staging_path = staging_path
        self._preloaded = preloaded
        self._process: Any = None
        self._connection: Connection | None = None

    @property
    def pid(self) -> int | None:
        """The process id, or None if it was not started."""
        return None if self._process is None else int(self._process.pid)

    def send(self, request: DrainRequest) -> None:
        """Send a request, starting the process if it is not alive.

        Raises:
            OSError, EOFError: the process could not be started, or died.
        """
        if self._process is None or not self._process.is_alive():
            self.stop(0.0)  # closes the connection of a dead process
            self._start()
        assert self._connection is not None
        self._connection.send(request)

    def receive(self, wait_seconds: float) -> DrainReply | None:
        """Return the next reply, or None if there is none within `wait_seconds`.

        Raises:
            OSError, EOFError: the process died or is not running.
        """
        if self._connection is None:
            raise EOFError("the drain worker is not running")
        if not self._connection.poll(wait_seconds):
            return None
        reply: DrainReply = self._connection.recv()
        return reply

    def stop(self, wait_seconds: float) -> None:
        """Close the connection, wait for the process to exit, and kill it after `wait_seconds`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.join(wait_seconds)
            if self._process.is_alive():
                # the partial directory it leaves is deleted by the next drain
                abandon(self._process)
            self._process = None

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("forkserver" if self._preloaded else "spawn")
        self._connection, theirs = context.Pipe()
        parent = upstream.forkserver_pid() if self._preloaded else os.getpid()
        if self._preloaded:
            forkserver.continue_server()
        with theirs, upstream.hidden_main():
            process = context.Process(
                target=serve, args=(str(self._staging_path), theirs, parent), daemon=True
            )
            process.start()
        self._process = process  # not before: a process that was never started cannot be joined


def serve(staging_path: str, connection: Connection, parent: int) -> None:
    """Handle requests until the connection is closed. Entry point of the process.

    Args:
        staging_path: the run's staging area.
        connection: receives `DrainRequest`, sends `DrainReply`.
        parent: pid of the process to die with.
    """
    setproctitle.setproctitle("grpo-run drain worker")
    os.setsid()  # Ctrl-C at the terminal must reach the supervisor only
    die_with_parent(parent)
    os.nice(NICENESS)
    staging = StagingArea(Path(staging_path))
    while True:
        try:
            request = connection.recv()
            reporter = _ProgressReporter(connection)
            with reporter.watching_io():
                reply = handle_request(staging, request, reporter)
            connection.send(reply)
        except (EOFError, OSError):
            return  # the supervisor closed the connection


class _ProgressReporter:
    """Send progress messages when called, and when the writing thread does I/O between calls.

    The kernel counts the I/O. One call of torch writes a whole record of an archive, which may take minutes.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._sent_at = time.monotonic()
        self._written_bytes = 0

    def __call__(self, written_bytes: int) -> None:
        self._written_bytes = written_bytes
        with self._lock:
            now = time.monotonic()
            if now - self._sent_at >= PROGRESS_SECONDS:
                self._sent_at = now
                self._connection.send(DrainProgress(written_bytes=written_bytes))

    @contextmanager
    def watching_io(self) -> Iterator[None]:
        """Watch the calling thread's I/O while the block runs. Nothing is sent after the block."""
        done = threading.Event()
        thread = threading.Thread(
            target=self._watch_io, args=(threading.get_native_id(), done), name="progress", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _watch_io(self, thread_id: int, done: threading.Event) -> None:
        before = read_io_counters(thread_id)
        while not done.wait(IO_POLL_SECONDS):
            now = read_io_counters(thread_id)
            if now != before:
                before = now
                try:
                    self(self._written_bytes)
                except OSError:
                    return  # the connection is closed; the writing thread notices too


def read_io_counters(thread_id: int) -> bytes | None:
    """Return one thread's I/O counters (proc_pid_io(5)), or None if the kernel has none.

    The counters are of one thread because reading them and sending messages count as I/O too.
    """
    try:
        return Path(f"/proc/self/task/{thread_id}/io").read_bytes()
    except OSError:
        return None
