"""`grpo-run save [RUN_DIR]`: one joint checkpoint at the next step all ranks agree on."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.record.run_directory import find_run


def main(arguments: Sequence[str]) -> int:
    """Leave the request on the board; the ranks' next vote carries it."""
    parser = argparse.ArgumentParser(prog="grpo-run save", description=__doc__)
    parser.add_argument("run", nargs="?", help="run directory or run id; default: the newest under runs/")
    options = parser.parse_args(arguments)
    run = find_run(options.run)
    if run.owner() is None:
        raise RunDirectoryError(f"nothing runs in {run.path}: no live supervisor")
    Board.open(run.board, writable=True).request_save()
    print(f"asked the ranks of {run.path} for a checkpoint")
    return 0
