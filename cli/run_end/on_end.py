"""Run the command of `--on-end`, with the outcome of the run on its standard input.

    grpo-run launch --on-end 'curl -s -d @- https://example.org/hook' train.py

Called by `launching/supervise.py` and `launch.py` after every end: finished, stopped, failed, and a failure of grpo-run itself. The command has
a minute, and its failure is a warning: the exit code of the run is decided before.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from typing import Any

LONGEST_SECONDS = 60.0
"""Time for a request to a chat or a pager with its retries; the node may be taken away soon after a stop."""
POLL_SECONDS = 0.05


def run_on_end(
    command: str,
    record: Mapping[str, Any],
    *,
    warn: Callable[[str], None],
    interrupted: Callable[[], bool] = lambda: False,
    longest_seconds: float = LONGEST_SECONDS,
) -> None:
    """Run the command with a shell and wait until it has ended. Its output is not captured.

    Args:
        command: as the user typed it.
        record: given to the command as JSON, followed by the end of its input.
        warn: receives one line if the command fails, is interrupted, or takes too long; it is killed then.
        interrupted: whether the user wants to exit now.
        longest_seconds: how long the command may take.
    """
    text = json.dumps(record, default=str).encode()
    # a file, not a pipe: a command that does not read its input must not block anyone
    descriptor = os.memfd_create("grpo-run-on-end", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, text)
        os.lseek(descriptor, 0, os.SEEK_SET)
        process = subprocess.Popen(["/bin/sh", "-c", command], stdin=descriptor, start_new_session=True)
    except OSError as error:
        warn(f"the command of --on-end could not be started: {error.strerror or error}")
        return
    finally:
        os.close(descriptor)
    deadline = time.monotonic() + longest_seconds
    while process.poll() is None:
        if interrupted() or time.monotonic() >= deadline:
            why = "was interrupted" if interrupted() else f"had not ended after {longest_seconds:g} s"
            _kill(process)
            warn(f"the command of --on-end {why} and was killed")
            return
        time.sleep(POLL_SECONDS)
    if process.returncode:
        how = (
            f"was killed by signal {-process.returncode}"
            if process.returncode < 0
            else f"exited with code {process.returncode}"
        )
        warn(f"the command of --on-end {how}")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the command and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended meanwhile
    process.wait()
