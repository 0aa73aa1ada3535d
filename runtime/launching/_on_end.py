"""After a run has ended: run the command of `--on-end`, and how long others may read the last state.

    grpo-run launch --on-end 'curl -s -d @- https://example.org/hook' train.py

The command gets the outcome of the run as a JSON object on its standard input, after every end: finished,
stopped, failed, and a failure of grpo-run itself. It has a minute, and its failure is a warning: the exit
code is decided before. Called by `_supervise.py` and `launch.py`.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.runtime.launching.request import RunResult
from grpo_run.watchdog.evidence.incident_files import read_verdict

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


SCHEMA = 1
STATUS_FIELDS = (
    "step", "target_steps", "attempts", "goodput", "checkpoint", "snapshot_step", "trains_without_trainer",
    "recoveries", "warnings",
)  # fmt: skip
"""Fields of `grpo-run status --json` that say how a run has ended."""


def end_record(result: RunResult) -> dict[str, Any]:
    """Return the object.

    Args:
        result: without a status if it could not be read, and then its fields are null.
    """
    status = result.status
    fields: dict[str, Any] = dict.fromkeys(STATUS_FIELDS)
    incident: str | None = None
    if status is not None:
        values = status.as_json()
        fields = {name: values[name] for name in STATUS_FIELDS}
        recoveries = status.history.recoveries
        incident = recoveries[-1].incident if recoveries else None
    return {
        "schema": SCHEMA,
        "run_id": result.run_id,
        "run_directory": str(result.run_directory),
        "node": os.uname().nodename,
        "state": result.state,
        "exit_code": result.exit_code,
        "sentence": result.sentence,
        **fields,
        "incident": incident,
        "verdict": read_verdict(incident) or None,
    }


def status_or_none(directory: RunDirectory) -> RunStatus | None:
    """Read the status of a run whose launch has failed; None where that fails too."""
    try:
        return run_reader(directory).read()
    except Exception:  # noqa: BLE001 - what is known of the end is told in any case
        return None


STOP_SECONDS = 20.0
"""After a request to stop, the command has exited by then. Kubernetes and Slurm kill 30 s after their
SIGTERM, and the exit code would be lost."""


def leave_at(stop_signals: Sequence[float], *, stopped: bool) -> float:
    """Return until when a scrape may be waited for, in monotonic seconds.

    Args:
        stop_signals: when this process was asked to stop. A stop that another node asked for leaves no time.
        stopped: whether the run has stopped on request.
    """
    if not stopped:
        return math.inf
    return stop_signals[0] + STOP_SECONDS if stop_signals else -math.inf
