"""Starts launches of a rehearsal as child processes, each with a deadline, and ends what they leave.

This process adopts the orphans of its descendants, so whatever a run leaves is found below it, and nothing
else is ever ended. Called by `rehearse.py`, in a process that has no other children.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from grpo_run.runtime.errors import ProcessError
from grpo_run.watchdog.processes import descendants, read_arguments, read_processes, read_stat

POLL_SECONDS = 0.05
LEAVE_SECONDS = 10.0
"""How long processes of a run that has ended may take to exit by themselves."""
KILL_SECONDS = 10.0


def launch(
    words: Sequence[str],
    *,
    environment: Mapping[str, str],
    output: Path,
    deadline_seconds: float,
    act: Callable[[], int | None],
    prefix: Sequence[str] = (),
) -> int | None:
    """Run `grpo-run launch` and wait for it.

    Args:
        words: after `launch`.
        environment: complete.
        output: receives what it prints.
        deadline_seconds: after so long it is killed.
        act: asked several times a second, returns a signal to send to the supervisor, or None.
        prefix: a command that it is started with.

    Returns:
        the exit code, negative for a signal; None if the deadline has ended it.
    """
    command = [*prefix, sys.executable, "-P", "-m", "grpo_run.cli.main", "launch", *words]
    deadline = time.monotonic() + deadline_seconds
    with open(output, "ab") as file:
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            start_new_session=True,
        )  # fmt: skip
    try:
        while (code := process.poll()) is None:
            if time.monotonic() > deadline:
                return None
            if (number := act()) is not None:
                process.send_signal(number)
            time.sleep(POLL_SECONDS)
        return code
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(KILL_SECONDS)


def end_all(grace_seconds: float = LEAVE_SECONDS) -> tuple[str, ...]:
    """Wait for the descendants of this process to exit, then kill those that have not.

    Returns:
        what was killed.

    Raises:
        ProcessError: one survives SIGKILL.
    """
    deadline, killed = time.monotonic() + grace_seconds, dict[int, str]()
    while left := _alive():
        now = time.monotonic()
        if now > deadline + KILL_SECONDS:
            raise ProcessError(f"processes of the rehearsal survive SIGKILL: {left}")
        if now > deadline:
            for pid in left:
                killed.setdefault(pid, read_arguments(pid)[:80])
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    return tuple(killed.values())


def _alive() -> list[int]:
    """Return the pids of living descendants, and reap children that have exited."""
    own = os.getpid()
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    return [
        pid
        for pid in descendants(read_processes(), [own])
        if pid != own and (stat := read_stat(pid)) is not None and stat.is_alive
    ]
