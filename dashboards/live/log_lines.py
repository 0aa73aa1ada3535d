"""What the log panel of the live page is sent: the newest lines of the ranks' output, then what is added.

Called by `server.py` for each panel that is open. Reads the files through `dashboards/rank_logs.py`; changes
nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice

from grpo_run.dashboards.rank_logs import LogLine, RankLogs
from grpo_run.runtime.history.run_directory import RunDirectory

FIRST_LINES = 500
"""Of each file, with which a panel begins."""
MOST_LINES = 2000
"""Lines of a batch."""
MOST_TEXT = 2000
READ_LINES = 50_000
"""Lines that are looked through at once, so that a search takes no process for long."""

Batch = list[tuple[int, int, int, str]]
"""Attempt, rank, file descriptor and text of lines."""


def log_lines(
    run: RunDirectory, *, rank: int | None, attempt: int | None, find: str
) -> Callable[[], Batch | None]:
    """Return a function that returns the lines since its last call, the newest of them if there are many;
    None once nothing more can come.

    Args:
        rank, attempt: whose lines; None for all.
        find: only lines that have it, in upper or lower case, from the beginning of the files.
    """
    logs = RankLogs(
        run, ranks=None if rank is None else {rank}, attempt=attempt, lines=None if find else FIRST_LINES
    )
    ended = False

    def batch() -> Batch | None:
        nonlocal ended
        if ended:
            return None
        found: deque[LogLine] = deque(maxlen=MOST_LINES)
        read = 0
        for line in islice(_next(), READ_LINES):
            read += 1
            if find.lower() in line.text.lower():
                found.append(line)
        ended = read < READ_LINES and run.owner() is None
        return [(one.attempt, one.rank, one.descriptor, one.text[:MOST_TEXT]) for one in found]

    def _next() -> Iterator[LogLine]:
        return logs.rest() if run.owner() is None else logs.new()

    return batch
