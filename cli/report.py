"""`grpo-run report [RUN]`: write what happened in a run, or in one of its incidents, as one file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_run.cli.command_parser import CommandParser
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.errors import RunDirectoryError, UsageError
from grpo_run.runtime.files import replace_file


def main(arguments: Sequence[str]) -> int:
    """Write the report and print its path, or print Markdown or JSON; returns 0."""
    parser = CommandParser(
        prog="grpo-run report",
        description=(
            "Write what happened in a run as one HTML page: verdict, wall time, curves, incidents, memory,"
            " configuration. With --incident, write the evidence of one incident."
        ),
    )
    parser.add_run()
    parser.add_argument("--incident", metavar="N", help="number of an incident, or `last`")
    parser.add_argument(
        "--format",
        choices=("html", "md", "json"),
        default="html",
        help="md and json are of a whole run, and are printed without --output (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write (default: report.html in the directory of the run or of the incident)",
    )
    options = parser.parse_args(arguments)

    from grpo_run.dashboards.reports import incident_contents, incident_page, run_contents, run_page

    run = find_run(options.run)
    if options.incident is not None:
        if options.format != "html":
            raise UsageError("an incident is written as HTML only; leave out --format")
        wanted = None if options.incident == "last" else options.incident
        incident = incident_contents.find_incident(run, wanted)
        text = incident_page.build(incident_contents.read_report(run, incident))
        path = options.output or incident / "report.html"
    else:
        write = {"html": run_page.as_html, "md": run_page.as_markdown, "json": run_page.as_json}
        text = write[options.format](run_contents.read_run_report(run))
        path = options.output or (run.path / "report.html" if options.format == "html" else None)
    if path is None:
        sys.stdout.write(text)
        return 0
    write_report(path, text.encode())
    print(path)
    return 0


def write_report(path: Path, content: bytes) -> None:
    """Write a file atomically with mode 0600, because it quotes the script's messages and data.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    try:
        replace_file(path, content)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write {str(path)!r}: {error.strerror or error}; give another file with --output"
        ) from None
