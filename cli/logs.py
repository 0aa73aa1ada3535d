"""`grpo-run logs [RUN] [-f]`: what the ranks of a run have printed, and what they print."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.which_run import which_run
from grpo_run.dashboards.rank_logs import LogLine, RankLogs
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
    parser.add_argument("--rank", metavar="R", help="only these ranks: numbers as 0,1 (default: all)")
    parser.add_argument(
        "--attempt", metavar="A", help="only this attempt: a number, or `last` (default: all)"
    )
    parser.add_argument(
        "--since",
        metavar="TIME",
        help="only what was printed since: 90s, 15m, 2h, 1d, or a time as 2026-01-31T12:00",
    )
    parser.add_argument(
        "-n",
        "--lines",
        metavar="N",
        help=f"only the last N lines of each rank and attempt, or `all` (default: {SCREEN_LINES} on a"
        " terminal, all in a pipe or with --since)",
    )
    options = parser.parse_args(arguments)
    since = None if options.since is None else _time(options.since, time.time())
    ranks = None if options.rank is None else [_number("--rank", word) for word in options.rank.split(",")]
    lines = SCREEN_LINES if sys.stdout.isatty() and since is None else None
    if options.lines is not None:
        lines = None if options.lines == "all" else _number("--lines", options.lines)
    run = which_run(options.run)
    present = RankLogs(run)
    attempts = present.attempts()
    attempt = None
    if options.attempt is not None:
        last = options.attempt == "last"
        attempt = max(attempts, default=-1) if last else _number("--attempt", options.attempt)
        if attempt not in attempts:
            raise UsageError(
                f"run {run.path.name} has no attempt {options.attempt}; {_have('attempt', attempts)}"
            )
    there = {rank for one in attempts for rank in present.ranks(one)}
    if there and ranks is not None and (missing := set(ranks) - there):
        raise UsageError(
            f"run {run.path.name} has no rank {min(missing)} here; {_have('rank', sorted(there))}"
        )
    logs = RankLogs(run, ranks=ranks, attempt=attempt, since=since, lines=lines)
    screen = _Screen(labels=ranks is None or len(ranks) > 1, attempts=attempt is None)
    while options.follow and run.owner() is not None:
        screen.show(logs.new())
        time.sleep(POLL_SECONDS)
    screen.show(logs.rest())
    return 0


class _Screen:
    """Prints lines, with the rank before each, and says which attempt they are of.

    Args:
        labels: whether several ranks are shown.
        attempts: whether several attempts are.
    """

    def __init__(self, *, labels: bool, attempts: bool) -> None:
        self._labels = labels
        self._attempt = 0 if attempts else None
        """Whose lines are printed: the first one is not announced."""

    def show(self, lines: Iterable[LogLine]) -> None:
        """Print, and let a reader see it."""
        for line in lines:
            if self._attempt not in (None, line.attempt):
                self._attempt = line.attempt
                print(f"--- attempt {line.attempt} ---")
            print(f"[rank{line.rank}] {line.text}" if self._labels else line.text)
        sys.stdout.flush()


def _time(text: str, now: float) -> float:
    """Return seconds since the epoch: so long ago, or a time.

    Raises:
        UsageError: it is neither.
    """
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text):
        return now - float(found[1]) * UNITS[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(
            f"--since {text}: give how long ago, as 90s, 15m, 2h or 1d, or a time as 2026-01-31T12:00"
        ) from None


def _number(option: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{option} {text}: give a number")
    return int(text)


def _have(what: str, numbers: Sequence[int]) -> str:
    if not numbers:
        return f"it has no {what} yet"
    listed = ", ".join(map(str, numbers)) if len(numbers) < 9 else f"{numbers[0]} to {numbers[-1]}"
    return f"there {'is' if len(numbers) == 1 else 'are'} {listed}"
