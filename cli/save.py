"""`grpo-run save [RUN] [--wait [SECONDS]]`: ask a run to save a checkpoint at the next step that all ranks
agree on.

The checkpoint is kept from rotation and pruning: somebody wanted it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.errors import CheckpointError, RunDirectoryError, UsageError
from grpo_run.runtime.history.events import CheckpointFailed, CheckpointPublished, StepCommitted
from grpo_run.runtime.history.history import DECODER, History
from grpo_run.runtime.history.journal import JournalReader
from grpo_run.runtime.history.run_directory import RunDirectory, supervisor_to_ask
from grpo_run.runtime.launching.reading import run_reader

EXIT_NOT_SAVED = 1
DEFAULT_WAIT_SECONDS = 600.0
"""A long generation, and writing a large checkpoint."""
POLL_SECONDS = 0.1


def main(arguments: Sequence[str]) -> int:
    """Write the request to the board, where the ranks' next vote reads it.

    Returns 0, or 1 (`EXIT_NOT_SAVED`) if `--wait` saw no checkpoint, or if nothing can be saved because the
    script trains with no Trainer and no loop.
    """
    parser = CommandParser(
        prog="grpo-run save",
        description=(
            "Ask a run to save a checkpoint at the next step. `save_total_limit` and `grpo-run checkpoints"
            " prune` do not delete it."
        ),
    )
    parser.add_run()
    parser.add_argument(
        "--wait",
        nargs="?",
        type=float,
        const=DEFAULT_WAIT_SECONDS,
        metavar="SECONDS",
        help=(
            "wait until the checkpoint is on disk and print its path only; exit code 1 if that takes longer"
            f" (default: {DEFAULT_WAIT_SECONDS:g})"
        ),
    )
    options = parser.parse_args(arguments)
    seconds = options.wait
    if seconds is not None and not 0 < seconds < float("inf"):
        raise UsageError(f"--wait {seconds:g}: give a number of seconds above 0")
    run = find_run(options.run)
    supervisor_to_ask(run)
    own = run_reader(run).history().no_trainer
    if own.current:
        print(f"nothing can be saved: {own.what_trains()}")
        return EXIT_NOT_SAVED
    board = Board.open(run.board, writable=True)
    if seconds is None:
        board.request_save()
        print(f"requested a checkpoint of the run in {run.path}")
        return 0
    return _save_and_wait(run, board, seconds)


def _save_and_wait(run: RunDirectory, board: Board, seconds: float) -> int:
    """Request a checkpoint, and wait until one that was taken after the request is on disk."""
    journal, history = JournalReader(run.journal, DECODER), History()
    for event in journal.new():
        history.apply(event)
    requested_at, attempts, trouble = (history.train_call, history.step), history.attempts, ""
    board.request_save()
    deadline = time.monotonic() + seconds
    while True:
        ended = run.owner() is None
        for event in journal.new():
            history.apply(event)
            if isinstance(event, StepCommitted) and history.attempts != attempts:
                attempts = history.attempts
                board.request_save()  # ranks that were started since do not know of the request
            elif isinstance(event, CheckpointFailed):
                trouble = f": {event.reason}"
            elif isinstance(event, CheckpointPublished):
                position = (event.train_call or 0, event.step)
                if position > requested_at and _is_kept(Path(event.path)):
                    print(event.path)
                    return 0
        if ended:
            raise RunDirectoryError(f"the run in {run.path} has ended before it saved the checkpoint")
        if history.no_trainer.current:
            print(f"nothing can be saved: {history.no_trainer.what_trains()}")
            return EXIT_NOT_SAVED
        if time.monotonic() >= deadline:
            print(f"no checkpoint is on disk {seconds:g} s after the request{trouble}")
            return EXIT_NOT_SAVED
        time.sleep(POLL_SECONDS)


def _is_kept(path: Path) -> bool:
    """Whether a checkpoint stays: the user asked for it, or it is the last one of its `train()` call."""
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        return False
    return manifest.kept or manifest.finished
