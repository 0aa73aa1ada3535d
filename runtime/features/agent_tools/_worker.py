"""A worker process that runs one tool of a rank, where it can be killed; both ends of it.

The tool is sent pickled by value, so the worker starts as an interpreter of its own, without the rank's
threads, locks and devices, and without the script's `__main__`. It keeps what the tool keeps in its globals
until it is killed. It is the leader of a process group, which is killed with it, and dies with the rank.
Called by `_calls.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from grpo_run.runtime.features.agent_tools._outages import CallEndedError, names_of
from grpo_run.runtime.processes.starting import die_with_parent

MAIN = "from grpo_run.runtime.features.agent_tools._worker import main; main()"
LOOK_SECONDS = 1.0
END_SECONDS = 10.0


class ToolError(Exception):
    """The tool has raised. The message is that of its exception, which TRL shows to the model.

    Args:
        class_names: of its exception, see `_outages.names_of`.
    """

    def __init__(self, message: str, class_names: frozenset[str]) -> None:
        super().__init__(message)
        self.class_names = class_names


class ToolWorker:
    """Runs one tool, in a process that is started for the first call and after each end.

    Args:
        function: of the script.
        on_waiting: called about once a second during a call.

    Raises:
        Exception: of any kind: the function cannot be pickled.
    """

    def __init__(self, function: Callable[..., Any], on_waiting: Callable[[], None]) -> None:
        self._content = cloudpickle.dumps(function)
        self._on_waiting = on_waiting
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def call(self, kwargs: dict[str, Any], limit_seconds: float) -> Any:
        """Return what the tool returns.

        Raises:
            CallEndedError: it has not returned in time, or its process has died.
            ToolError: it has raised.
        """
        due_at = time.monotonic() + limit_seconds

        def ended(why: str) -> CallEndedError:
            return CallEndedError(limit_seconds, f"killed ({why})")

        try:
            connection, process = self._started()
            connection.send_bytes(cloudpickle.dumps(kwargs))
            while not connection.poll(max(0.0, min(LOOK_SECONDS, due_at - time.monotonic()))):
                self._on_waiting()
                if process.poll() is not None and not connection.poll(0.0):
                    raise ended(f"its process has ended with code {process.returncode}")
                if time.monotonic() >= due_at:
                    raise ended(f"no answer within {limit_seconds:g} s")
            raised, value = cloudpickle.loads(connection.recv_bytes())
        except (OSError, EOFError) as error:
            self.close()
            raise ended("its process has died") from error
        except CallEndedError:
            self.close()
            raise
        if raised:
            raise ToolError(*value)
        return value

    def close(self) -> None:
        """Kill the worker, if there is one, with what it has started."""
        process, self._process = self._process, None
        if self._connection is not None:
            self._connection.close()
        if process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.wait(END_SECONDS)

    def _started(self) -> tuple[Connection, subprocess.Popen[bytes]]:
        if self._process is None or self._connection is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", MAIN, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
            self._connection = Connection(ours.detach())
            self._connection.send_bytes(self._content)
        return self._connection, self._process


def main() -> None:
    """Run the calls that the rank sends, until it closes the connection."""
    descriptor, rank = map(int, sys.argv[1:3])
    os.setpgid(0, 0)
    die_with_parent(rank)
    os.set_inheritable(descriptor, False)
    sys.argv[1:] = []
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, ConnectionError):
        function = cloudpickle.loads(connection.recv_bytes())
        while True:
            kwargs = cloudpickle.loads(connection.recv_bytes())
            connection.send_bytes(_answer(function, kwargs))


def _answer(function: Callable[..., Any], kwargs: dict[str, Any]) -> bytes:
    try:
        value = function(**kwargs)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return cloudpickle.dumps((False, value))  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001 - the tool's own, or a result that cannot be pickled
        return cloudpickle.dumps((True, (str(error), names_of(error))))  # type: ignore[no-any-return]
