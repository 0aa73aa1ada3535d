"""The rank processes of one attempt on this node: starting, waiting and terminating.

Called by `agent.py`. Each rank is the leader of its own session and process group. Does not determine why a
rank exited or what follows, and does not terminate what a rank has started (`helpers.py`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from grpo_run.runtime.errors import ProcessError
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.starting import interpreter_command
from grpo_run.watchdog.observation import Exit

KILL_DEADLINE_SECONDS = 10.0
"""How long a process may take to exit after SIGKILL."""
LOST_EXIT_CODE = 255
"""What multiprocessing returns for a child whose forkserver has ended before it could report an exit code."""
SERVER_END_SECONDS = 0.1
"""How long a forkserver may take to end after the kernel has killed its children for its end."""
RETRY_SECONDS = 30.0
"""How long to try to start a rank while the machine lacks something."""
RETRY_EVERY_SECONDS = 1.0
TRANSIENT_ERRNOS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What one rank is started with, in the working directory of this process.

    Args:
        rank: global rank.
        environment: its variables.
        log: receives stdout.
        errors: receives stderr; None for the same file.
    """

    rank: int
    environment: Mapping[str, str]
    log: Path
    errors: Path | None = None


class _ForkedRank:
    """A child of the forkserver, which reports its exit code."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel

    def poll(self) -> int | None:
        return self._process.exitcode

    def release(self) -> None:
        self._process.close()


class _SpawnedRank:
    """A fresh interpreter, for scripts that set environment variables which libraries read at import."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid: int = process.pid
        try:
            self.sentinel: int = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise

    def poll(self) -> int | None:
        return self._process.poll()

    def release(self) -> None:
        os.close(self.sentinel)


class RankGroup:
    """The ranks of one attempt on this node.

    Args:
        specs: one per local rank.
        entry: `module:function` that runs the user's script.
        preloaded: fork from the warm interpreter instead of starting fresh ones.

    Raises:
        ProcessError: a rank cannot be started; those started before it are killed.
    """

    def __init__(self, specs: Sequence[RankSpec], *, entry: str, preloaded: bool) -> None:
        self._specs = list(specs)
        self._preloaded = preloaded
        self._processes: dict[int, _ForkedRank | _SpawnedRank] = {}
        self._exits: dict[int, Exit] = {}
        self._poll = select.poll()
        self._polled: set[int] = set()
        for index, spec in enumerate(self._specs):
            try:
                self._processes[index] = _start_with_retries(spec, entry, preloaded)
            except (OSError, EOFError) as error:
                self.kill()
                raise ProcessError(f"rank {spec.rank} could not be started: {error}") from error

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return {index: process.pid for index, process in self._processes.items()}

    @property
    def alive(self) -> dict[int, int]:
        """Process ids of the ranks that have not exited, by local rank."""
        return {index: process.pid for index, process in self._processes.items() if index not in self._exits}

    def wait(self, timeout_seconds: float) -> list[Exit]:
        """Wait until a rank exits, at most `timeout_seconds`. Returns the exits not returned before."""
        waiting = {self._processes[index].sentinel: index for index in self.alive}
        if not waiting:
            return []
        if waiting.keys() != self._polled:
            self._poll, self._polled = select.poll(), set(waiting)
            for sentinel in waiting:
                self._poll.register(sentinel, select.POLLIN)
        if self._preloaded:
            forkserver.continue_server()  # it reports the exits
        exits = []
        for sentinel, _ in self._poll.poll(timeout_seconds * 1000):
            index = waiting[sentinel]
            code = self._processes[index].poll()
            if code is None:
                continue
            lost = self._preloaded and code == LOST_EXIT_CODE
            end = forkserver.server_end(SERVER_END_SECONDS) if lost else None
            if end is not None:
                code = -signal.SIGKILL  # `die_with_parent`
            exit = Exit(
                rank=self._specs[index].rank,
                pid=self._processes[index].pid,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                order=len(self._exits),
                forkserver=end,
            )
            self._exits[index] = exit
            exits.append(exit)
        return exits

    def request_exit(self) -> None:
        """Send every rank SIGTERM, and return. SIGCONT follows, because a stopped process does not handle
        signals.
        """
        for pid in self.alive.values():
            _send(pid, signal.SIGTERM)
            _send(pid, signal.SIGCONT)

    def kill(self, grace_seconds: float = 0.0) -> None:
        """Terminate every rank, and wait until all have exited.

        Args:
            grace_seconds: time between SIGTERM and SIGKILL; 0 sends no SIGTERM.

        Raises:
            ProcessError: a rank has not exited 10 s after SIGKILL. It is in uninterruptible sleep, and may
                hold a device.
        """
        if grace_seconds and self.alive:
            self.request_exit()
            deadline = time.monotonic() + grace_seconds
            while self.alive and (remaining := deadline - time.monotonic()) > 0:
                self.wait(remaining)
        for pid in self.alive.values():
            _send(pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_DEADLINE_SECONDS
        while self.alive and time.monotonic() < deadline:
            self.wait(0.05)
        if self.alive:
            raise ProcessError(
                f"processes {sorted(self.alive.values())} survived SIGKILL for {KILL_DEADLINE_SECONDS:.0f} s"
            )

    def release(self) -> None:
        """Close the descriptors of the processes, all of which must have exited."""
        for process in self._processes.values():
            process.release()
        self._processes.clear()


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it has exited already, or it belongs to another user (setuid) and may not be killed


def _start_with_retries(spec: RankSpec, entry: str, preloaded: bool) -> _ForkedRank | _SpawnedRank:
    """Start a rank; wait if the machine has no memory, descriptors or processes left at present.

    A rank that was just killed for its memory may need seconds to release it.
    """
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        try:
            return _start(spec, entry, preloaded)
        except OSError as error:
            if error.errno not in TRANSIENT_ERRNOS or time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_EVERY_SECONDS)


def _start(spec: RankSpec, entry: str, preloaded: bool) -> _ForkedRank | _SpawnedRank:
    if preloaded:
        return _ForkedRank(forkserver.start_child(entry, spec.environment, os.getcwd()))
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    with contextlib.ExitStack() as opened:
        streams = []
        for path in (spec.log, spec.errors or spec.log):
            streams.append(os.open(path, flags, 0o600))
            opened.callback(os.close, streams[-1])
        process = subprocess.Popen(
            interpreter_command(entry),
            env=dict(spec.environment),
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,
        )
    return _SpawnedRank(process)
