"""`grpo-run logs [RUN] [-f]`: what the ranks of a run have printed, and what they print."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime

from grpo_run.cli.command_parser import CommandParser
from grpo_run.dashboards.rank_logs import LogLine, RankLogs
from grpo_run.runtime.catalog import find_run
from grpo_run.runtime.errors import UsageError

POLL_SECONDS = 0.3
SCREEN_LINES = 200
"""Last lines of each rank that a terminal gets."""
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def main(arguments: Sequence[str]) -> int:
    """Print the lines; with `-f`, until the run ends; returns 0."""
    parser = CommandParser(
        prog="grpo-run logs",
        description=(
            "Show what the ranks of a run have printed, attempt by attempt. Control sequences of the"
            " terminal, such as colours, and earlier states of progress bars are left out; the files in"
            " attempts/ of the run directory have them."
        ),
    )
    parser.add_run()
    parser.add_argument(
        "-f", "--follow", action="store_true", help="go on until the run ends, also over restarts"
    )
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        metavar="R",
        help="only this rank; may be repeated (default: all)",
    )
    parser.add_argument(
        "--attempt", type=int, metavar="A", help="only this attempt; -1 is the last one (default: all)"
    )
    parser.add_argument(
        "--since", metavar="TIME", help="only what was printed since: 90s, 15m, 2h, 1d, or 2026-01-31T12:00"
    )
    parser.add_argument(
        "-n", "--lines", type=int, metavar="N",
        help="only the last N lines of each rank and attempt; 0 for all (default: 200 on a terminal, all in a"
        " pipe or with --since)",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    since = None if options.since is None else _time(options.since, time.time())
    lines = options.lines
    if lines is None and sys.stdout.isatty() and since is None:
        lines = SCREEN_LINES
    run = find_run(options.run)
    present = RankLogs(run)
    attempts = present.attempts()
    attempt = options.attempt
    if attempt is not None:
        attempt = attempts[attempt] if -len(attempts) <= attempt < 0 else attempt
        _check("attempt", attempt, attempts)
    for rank in options.rank or ():
        _check("rank", rank, sorted({rank for one in attempts for rank in present.ranks(one)}))
    logs = RankLogs(run, ranks=options.rank, attempt=attempt, since=since, lines=lines or None)
    labels, shown = options.rank is None or len(options.rank) > 1, attempt or 0

    def show(new: Iterable[LogLine]) -> None:
        nonlocal shown
        for line in new:
            if line.attempt != shown:
                shown = line.attempt
                print(f"--- attempt {shown} ---")
            print(f"[rank{line.rank}] {line.text}" if labels else line.text)
        sys.stdout.flush()

    while options.follow and run.owner() is not None:
        show(logs.new())
        time.sleep(POLL_SECONDS)
    show(logs.rest())
    return 0


def _check(what: str, number: int, present: Sequence[int]) -> None:
    """Raise `UsageError` if the run has no such rank or attempt."""
    if number not in present:
        have = f"{present[0]} to {present[-1]}" if present else "none yet"
        raise UsageError(f"--{what} {number}: there is no such {what} here; the run has {have}")


def _time(text: str, now: float) -> float:
    """Return seconds since the epoch: so long ago, or a time.

    Raises:
        UsageError: it is neither.
    """
    if found := re.fullmatch(r"(\d+)([smhd])", text):
        return now - int(found[1]) * UNITS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(f"--since {text}: give 90s, 15m, 2h, 1d, or a time as 2026-01-31T12:00") from None
