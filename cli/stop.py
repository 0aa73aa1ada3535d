"""`grpo-run stop [RUN] [--wait SECONDS]`: ask a run to save a checkpoint at an agreed step and exit."""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.board import stop_requests
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.run_directory import RunDirectory, supervisor_to_ask
from grpo_run.runtime.processes.identity import ProcessIdentity


def request(run: RunDirectory, supervisor: ProcessIdentity) -> str:
    """Ask the supervisor to stop: by a signal if its pid is its own here, else through the board.

    Returns:
        how the supervisor is named.

    Raises:
        RunDirectoryError: it cannot be asked from here; nothing was signaled.
    """
    try:
        if supervisor.send(signal.SIGTERM):
            return str(supervisor.pid)
    except ProcessLookupError:
        raise RunDirectoryError(
            f"no run is active in {run.path}: supervisor {supervisor.pid} has just exited"
        ) from None
    except PermissionError:
        raise RunDirectoryError(
            f"the supervisor of the run in {run.path} (pid {supervisor.pid}) belongs to another user, who can"
            " stop it"
        ) from None
    if not stop_requests.ask(run.board):
        if run.supervisor() is None:
            raise RunDirectoryError(f"no run is active in {run.path}: its supervisor has just exited")
        raise RunDirectoryError(
            f"the supervisor of the run in {run.path} runs where it cannot be signaled from here, and has not"
            f" answered in {stop_requests.ANSWER_SECONDS:g} s; stop it there: its pid is {supervisor.pid}"
        )
    return f"{supervisor.pid} in another container"


def main(arguments: Sequence[str]) -> int:
    """Ask the supervisor and, with `--wait`, wait until it exits.

    Returns 0, or 1 if it has not exited in time.
    """
    parser = CommandParser(
        prog="grpo-run stop",
        description=(
            "Ask a run to save a checkpoint at the next step and exit with 75. A script that trains with no"
            " Trainer and no loop gets SIGTERM at once."
        ),
    )
    parser.add_run()
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait until the run has stopped; exit code 1 if it takes longer",
    )
    options = parser.parse_args(arguments)
    run = find_run(options.run)
    supervisor = supervisor_to_ask(run)
    print(f"requested a stop of the run in {run.path} (supervisor {request(run, supervisor)})")
    deadline = time.monotonic() + options.wait
    while options.wait and run.owner() is not None:
        if time.monotonic() >= deadline:
            print(f"still stopping after {options.wait:g} s")
            return 1
        time.sleep(0.1)
    return 0
