"""`grpo-run stop [RUN_DIR] [--wait SECONDS]`: all ranks agree on a step, save one checkpoint and leave."""

from __future__ import annotations

import argparse
import os
import signal
import time
from collections.abc import Sequence

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.record.run_directory import find_run


def main(arguments: Sequence[str]) -> int:
    """Signal the supervisor; with `--wait`, see it gone."""
    parser = argparse.ArgumentParser(prog="grpo-run stop", description=__doc__)
    parser.add_argument("run", nargs="?", help="run directory or run id; default: the newest under runs/")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="wait until it has ended")
    options = parser.parse_args(arguments)
    run = find_run(options.run)
    owner = run.owner()
    if owner is None:
        raise RunDirectoryError(f"nothing runs in {run.path}: no live supervisor")
    try:
        os.kill(owner, signal.SIGTERM)
    except ProcessLookupError:
        raise RunDirectoryError(f"nothing runs in {run.path}: supervisor {owner} has just ended") from None
    print(f"asked supervisor {owner} of {run.path} to stop")
    deadline = time.monotonic() + options.wait
    while options.wait and run.owner() is not None:
        if time.monotonic() >= deadline:
            print(f"still stopping after {options.wait:g} s")
            return 1
        time.sleep(0.1)
    return 0
