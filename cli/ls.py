"""`grpo-run ls [--json]`: list all runs with state, step, age and size."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.removal import areas_of
from grpo_run.cli.text import print_table
from grpo_run.runtime.catalog import RunEntry, read_runs, run_directories
from grpo_run.runtime.files import short_path
from grpo_run.watchdog.text import duration_text, size_text

TITLES = ("run", "state", "step", "age", "size", "memory", "directory")


def main(arguments: Sequence[str]) -> int:
    """Print one line per run, the one with the latest event first; returns 0."""
    parser = CommandParser(
        prog="grpo-run ls",
        description="List all runs: those in runs/, and those that this user has launched elsewhere.",
        epilog=(
            "`age` is the time since the last event. `size` is the size of the run directory; it includes"
            " only checkpoints that a killed start has left without another copy. `memory` is the shared"
            " memory of its snapshots."
        ),
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    paths = run_directories()
    entries = read_runs(paths, areas_of(paths))
    if options.json:
        print(json.dumps({"runs": [entry.as_json() for entry in entries]}, indent=2))
        return 0
    if not entries:
        print("no runs in runs/, and none that was launched elsewhere")
        return 0
    now = time.time()
    print_table([TITLES, *(_row(entry, now) for entry in entries)])
    return 0


def _row(entry: RunEntry, now: float) -> tuple[str, ...]:
    history = None if entry.status is None else entry.status.history
    step = "" if history is None else str(history.step)
    if history is not None and history.target_steps:
        step += f" of {history.target_steps}"
    elif history is not None and history.no_trainer.seen and not history.step:
        step = "not counted"
    return (
        entry.run_id,
        entry.state,
        step,
        duration_text(now - entry.last_time),
        size_text(entry.size_bytes),
        size_text(entry.memory_bytes) if entry.memory_bytes else "",
        short_path(entry.directory.path),
    )
