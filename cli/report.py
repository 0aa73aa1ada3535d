"""`grpo-run report [RUN_DIR] [--incident N] [--output FILE]`: one incident as one page to open in a browser."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.record.run_directory import find_run


def main(arguments: Sequence[str]) -> int:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(prog="grpo-run report", description=__doc__)
    parser.add_argument("run", nargs="?", help="run directory or run id; default: the newest under runs/")
    parser.add_argument("--incident", metavar="N", help="the incident's number; default: the latest")
    parser.add_argument("--output", metavar="FILE", type=Path, help="default: report.html beside the verdict")
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
    """All of the page or none, mode 0600: it quotes the script's messages and data.

    Raises:
        RunDirectoryError: it cannot be written.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(page)
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise RunDirectoryError(
            f"cannot write the report {str(path)!r}: {error.strerror or error}; give another with --output"
        ) from None
