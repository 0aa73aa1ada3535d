"""`grpo-run trace [RUN]`: write a run's steps, faults and phases as a file for Perfetto."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.report import write_report
from grpo_run.runtime.catalog import find_run


def main(arguments: Sequence[str]) -> int:
    """Write the file and print its path; returns 0."""
    parser = CommandParser(
        prog="grpo-run trace",
        description=(
            "Write a run as a Chrome trace, which https://ui.perfetto.dev shows: attempts, steps, saves and"
            " recoveries of the whole run, and the phases of each rank before each incident."
        ),
    )
    parser.add_run()
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write, compressed if it ends in .gz (default: trace.json.gz in the run directory)",
    )
    options = parser.parse_args(arguments)

    from grpo_run.dashboards.reports.trace import read_trace

    run = find_run(options.run)
    path = options.output or run.path / "trace.json.gz"
    content = json.dumps(read_trace(run), separators=(",", ":")).encode()
    write_report(path, gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    print(path)
    return 0
