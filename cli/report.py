"""`grpo-run report [RUN] [--incident N] [--output FILE]`: write one incident as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import replace_file


def main(arguments: Sequence[str]) -> int:
    """Write the page and print its path; returns 0."""
    parser = CommandParser(
        prog="grpo-run report",
        description="Write one incident as an HTML page: verdict, timeline, stacks, collectives, memory.",
    )
    parser.add_run()
    parser.add_argument("--incident", metavar="N", help="number of the incident (default: the latest)")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write (default: report.html in the incident's folder)",
    )
    options = parser.parse_args(arguments)

    from plotly.offline import get_plotlyjs

    from grpo_run.dashboards.incident_report.contents import find_incident, read_report
    from grpo_run.dashboards.incident_report.page import build

    run = find_run(options.run)
    incident = find_incident(run, options.incident)
    path = options.output or incident / "report.html"
    write_page(path, build(read_report(run, incident), get_plotlyjs()))
    print(path)
    return 0


def write_page(path: Path, page: str) -> None:
    """Write the page atomically with mode 0600, because it quotes the script's messages and data.

    Raises:
        RunDirectoryError: the page cannot be written.
    """
    try:
        replace_file(path, page.encode())
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write the report {str(path)!r}: {error.strerror or error}; give another file with"
            " --output"
        ) from None
