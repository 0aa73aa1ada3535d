"""`grpo-run stop [RUN] [--wait SECONDS]`: ask a run to save a checkpoint at an agreed step and exit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.catalog.runs import find_run
from grpo_run.runtime.errors import RunDirectoryError


def main(arguments: Sequence[str]) -> int:
    """Signal the supervisor and, with `--wait`, wait until it exits.

    Returns 0, or 1 if it has not exited in time.
    """
    parser = CommandParser(
        prog="grpo-run stop", description="Ask a run to save a checkpoint at the next step and exit with 75."
    )
    parser.add_argument(
        "run", nargs="?", help="run directory or run id (default: the newest run under runs/)"
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="wait until the run has stopped; exit code 1 if it takes longer",
    )
    options = parser.parse_args(arguments)
    run = find_run(options.run)
    owner = run.owner()
    if owner is None:
        raise RunDirectoryError(f"no run is active in {run.path}")
    try:
        os.kill(owner, signal.SIGTERM)
    except ProcessLookupError:
        raise RunDirectoryError(
            f"no run is active in {run.path}: supervisor {owner} has just exited"
        ) from None
    print(f"requested a stop of the run in {run.path} (supervisor {owner})")
    deadline = time.monotonic() + options.wait
    while options.wait and run.owner() is not None:
        if time.monotonic() >= deadline:
            print(f"still stopping after {options.wait:g} s")
            return 1
        time.sleep(0.1)
    return 0
