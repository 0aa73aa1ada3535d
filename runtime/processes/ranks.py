"""The processes of one attempt: starting them, waiting for any to end, ending them all.

Called by `agent.py`. Each rank is a session and process group of its own, so that whatever it started
goes down with it. Does not decide why a rank ended or what follows.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from grpo_run.runtime.errors import ProcessError
from grpo_run.runtime.processes import forkserver
from grpo_run.watchdog.observation import Exit
from grpo_run.watchdog.processes import members_by_session

KILL_DEADLINE_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What one rank is started with. `environment` is whole; `log` receives its stdout and stderr."""

    rank: int
    local_rank: int
    environment: Mapping[str, str]
    directory: str
    log: Path


class _Forked:
    """A child of the forkserver; the server tells how it ended."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        assert process.pid is not None
        self.pid: int = process.pid
        self.sentinel: int = process.sentinel

    def poll(self) -> int | None:
        return self._process.exitcode

    def release(self) -> None:
        self._process.close()


class _Fresh:
    """A new interpreter, for scripts whose environment must be read at import."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid: int = process.pid
        self.sentinel: int = os.pidfd_open(process.pid)

    def poll(self) -> int | None:
        return self._process.poll()

    def release(self) -> None:
        os.close(self.sentinel)


class RankGroup:
    """The ranks of one attempt on this node.

    Args:
        specs: one a local rank.
        entry: `module:function` that runs the user's script.
        preloaded: fork from the warm interpreter, or start fresh ones.
    """

    def __init__(self, specs: Sequence[RankSpec], *, entry: str, preloaded: bool) -> None:
        self._specs = list(specs)
        self._processes: dict[int, _Forked | _Fresh] = {}
        self._exits: dict[int, Exit] = {}
        for index, spec in enumerate(self._specs):
            try:
                self._processes[index] = _start(spec, entry, preloaded)
            except (OSError, EOFError) as error:
                self.kill()
                raise ProcessError(f"rank {spec.rank} could not be started: {error}") from error

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by local rank."""
        return {index: process.pid for index, process in self._processes.items()}

    @property
    def exits(self) -> dict[int, Exit]:
        """How the ranks that have ended did so, by local rank."""
        return dict(self._exits)

    @property
    def alive(self) -> dict[int, int]:
        """Process ids of the ranks still running, by local rank."""
        return {index: process.pid for index, process in self._processes.items() if index not in self._exits}

    def wait(self, timeout_seconds: float) -> list[Exit]:
        """Wait until a rank ends, at most `timeout_seconds`; returns the exits seen for the first time."""
        waiting = {self._processes[index].sentinel: index for index in self.alive}
        if not waiting:
            return []
        ready = connection.wait(list(waiting), timeout_seconds)
        seen = []
        for sentinel in ready:
            index = waiting[sentinel]  # type: ignore[index]
            code = self._processes[index].poll()
            if code is None:
                continue
            exit = Exit(
                rank=self._specs[index].rank,
                pid=self._processes[index].pid,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                order=len(self._exits),
            )
            self._exits[index] = exit
            seen.append(exit)
        return seen

    def signal(self, number: int) -> None:
        """Send a signal to every rank's main process still alive."""
        for pid in self.alive.values():
            _send(os.kill, pid, number)

    def kill(self, grace_seconds: float = 0.0) -> None:
        """End every rank and whatever it started in its session, and see them gone.

        Args:
            grace_seconds: how long ranks may take to leave after SIGTERM, before SIGKILL; 0 sends no SIGTERM. A
                stopped rank is continued, or it could not hear it.

        Raises:
            ProcessError: one is still there after 10 s (uninterruptible sleep: it may hold a device).
        """
        if grace_seconds and self.alive:
            for pid in self.alive.values():
                _send(os.killpg, pid, signal.SIGTERM)
                _send(os.killpg, pid, signal.SIGCONT)
            polite_until = time.monotonic() + grace_seconds
            while self.alive and (left := polite_until - time.monotonic()) > 0:
                self.wait(left)
        # a leader that has exited may have left members of its session behind, in groups of their own
        for pid, members in members_by_session(self.pids.values()).items():
            for member in members:
                _send(os.kill, member, signal.SIGKILL)
            _send(os.killpg, pid, signal.SIGKILL)
        deadline = time.monotonic() + KILL_DEADLINE_SECONDS
        while self.alive and time.monotonic() < deadline:
            self.wait(0.05)
        if self.alive:
            raise ProcessError(
                f"processes {sorted(self.alive.values())} survived SIGKILL for {KILL_DEADLINE_SECONDS:.0f} s"
            )

    def release(self) -> None:
        """Give back descriptors; every rank must have ended."""
        for process in self._processes.values():
            process.release()
        self._processes.clear()


def _send(function: object, pid: int, number: int) -> None:
    try:
        function(pid, number)  # type: ignore[operator]
    except (ProcessLookupError, PermissionError):
        return  # gone, which is what was wanted; or another user's (setuid), which nobody here may end


def _start(spec: RankSpec, entry: str, preloaded: bool) -> _Forked | _Fresh:
    if preloaded:
        return _Forked(forkserver.start_child(entry, spec.environment, spec.directory))
    module, _, function = entry.partition(":")
    log = os.open(spec.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            # -P-like safety is not wanted: the bootstrap sets sys.path[0] to what the script expects
            [
                sys.executable,
                "-u",
                "-c",
                f"import sys; del sys.path[0]; from {module} import {function} as f; f()",
            ],
            env=dict(spec.environment),
            cwd=spec.directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    finally:
        os.close(log)
    return _Fresh(process)
