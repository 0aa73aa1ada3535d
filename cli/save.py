"""`grpo-run save [RUN]`: ask a run to save a checkpoint at the next step that all ranks agree on."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.catalog.runs import find_run
from grpo_run.runtime.errors import RunDirectoryError


def main(arguments: Sequence[str]) -> int:
    """Write the request to the board, where the ranks' next vote reads it; returns 0."""
    parser = CommandParser(
        prog="grpo-run save", description="Ask a run to save a checkpoint at the next step."
    )
    parser.add_argument(
        "run", nargs="?", help="run directory or run id (default: the newest run under runs/)"
    )
    options = parser.parse_args(arguments)
    run = find_run(options.run)
    if run.owner() is None:
        raise RunDirectoryError(f"no run is active in {run.path}")
    Board.open(run.board, writable=True).request_save()
    print(f"requested a checkpoint of the run in {run.path}")
    return 0
