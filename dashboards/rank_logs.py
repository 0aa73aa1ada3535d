"""What ranks have printed, line by line, over the attempts of a run, while it goes on or later.

Used by `grpo-run logs` and the log panel of the live page, each with an object of its own: readers do not
know of one another. Memory is bounded: a part of one file is read at a time. Texts are harmless for a
terminal and a page. The files are those of `runtime/history/attempt_files.py`; a rank's lines have the order
in which it printed them, and ranks follow one another. Writes nothing and has no thread.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from grpo_run.dashboards.clean_text import clean
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.processes.output import MAX_BEHIND_BYTES, MAX_LINE_BYTES, TIMES, FileFollower

BLOCK_BYTES = 64 << 10
FIRST_LINES = 500
"""Of each file, with which a panel begins."""
MOST_LINES = 2000
"""Lines of a batch."""
MOST_TEXT = 2000
READ_LINES = 50_000
"""Lines that are looked through at once, so that a search takes no process for long."""

Batch = list[tuple[int, int, int, str]]
"""Attempt, rank, file descriptor and text of lines."""
_NAME = re.compile(r"rank(\d+)\.(log|err)")
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]|\0")
"""Control sequences of a terminal as a whole, such as colours, titles and movements, and null bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """One line of a rank.

    Attributes:
        descriptor: 1 for its standard output, or for both streams in one file; 2 for standard error.
        text: of the line, without its end, cut after 16 KiB.
    """

    attempt: int
    rank: int
    descriptor: int
    text: str


class RankLogs:
    """Follows the output of a run.

    Args:
        ranks: whose output; None for all.
        attempt: of which attempt; None for all, also those that begin later.
        since: leave out what was printed longer ago, in seconds since the epoch, to `TIMES_SECONDS`.
        lines: begin with so many last lines of each file; None for all.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        ranks: Collection[int] | None = None,
        attempt: int | None = None,
        since: float | None = None,
        lines: int | None = None,
    ) -> None:
        self._folder = run.path / "attempts"
        self._ranks = ranks
        self._attempt = attempt
        self._since = since
        self._lines = lines
        self._present = self.attempts()
        """Attempts of which `lines` last lines are wanted."""
        self._files: dict[tuple[int, int, int], FileFollower] = {}
        self._next = 0
        """The first attempt that has not been read to its end."""
        self._waiting: deque[LogLine] = deque()

    def attempts(self) -> list[int]:
        """Return the attempts of the run."""
        with contextlib.suppress(OSError):
            return sorted(int(name) for name in os.listdir(self._folder) if name.isdecimal())
        return []

    def ranks(self, attempt: int) -> list[int]:
        """Return the ranks of an attempt that have a file on this host."""
        return sorted({rank for rank, _ in self._paths(attempt)})

    def new(self) -> Iterator[LogLine]:
        """Yield the complete lines that have been printed since the last call; the first one yields all that
        are there. A caller that stops gets the rest from the next call.
        """
        return self._read(ended=False)

    def rest(self) -> Iterator[LogLine]:
        """Yield what `new` would, and lines without an end: nothing more is printed."""
        return self._read(ended=True)

    def _read(self, *, ended: bool) -> Iterator[LogLine]:
        attempts = self.attempts()
        for attempt in attempts:
            if attempt < self._next or self._attempt not in (None, attempt):
                continue
            is_last = ended or attempt != attempts[-1]
            for (rank, descriptor), path in sorted(self._paths(attempt).items()):
                if self._ranks is not None and rank not in self._ranks:
                    continue
                key = attempt, rank, descriptor
                if key not in self._files:
                    start = self._start(path, *key)
                    self._files[key] = FileFollower(path, by_lines=True, start=start, whole=True)
                yield from self._lines_of(key, is_last=is_last)
            if is_last:
                self._next = attempt + 1
                self._files = {key: file for key, file in self._files.items() if key[0] > attempt}

    def _lines_of(self, key: tuple[int, int, int], *, is_last: bool) -> Iterator[LogLine]:
        """Yield what waits, then what a file has; `is_last`: also a line without its end."""
        file = self._files[key]
        while True:
            while self._waiting:
                yield self._waiting.popleft()
            before = file.line_start
            texts = file.read_lines()
            if not texts and file.line_start == before:
                if not is_last:
                    return
                texts, is_last = list(file.read_all_lines()), False
            attempt, rank, descriptor = key
            self._waiting.extend(
                LogLine(attempt=attempt, rank=rank, descriptor=descriptor, text=harmless(text))
                for text in texts
            )

    def _paths(self, attempt: int) -> dict[tuple[int, int], Path]:
        """Return the files of an attempt by rank and descriptor."""
        folder = self._folder / f"{attempt:03d}"
        with contextlib.suppress(OSError):
            return {
                (int(found[1]), 1 if found[2] == "log" else 2): folder / found[0]
                for name in os.listdir(folder)
                if (found := _NAME.fullmatch(name))
            }
        return {}

    def _start(self, path: Path, attempt: int, rank: int, descriptor: int) -> int:
        """Return where to begin in a file."""
        start = 0
        with contextlib.suppress(OSError):
            if self._since is not None:
                start = _start_of_time(path, rank, descriptor, self._since)
            if self._lines is not None and attempt in self._present:
                start = max(start, start_of_last(path, self._lines))
        return start


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


def harmless(text: str) -> str:
    """Return a line without what a terminal obeys."""
    if text.isprintable() and len(text) <= MAX_LINE_BYTES:  # nearly all lines, at a tenth of the cost
        return text
    return clean(_ESCAPES.sub("", text), MAX_LINE_BYTES)


def start_of_last(path: Path, lines: int) -> int:
    """Return where the last lines of a file begin, at most `MAX_BEHIND_BYTES` back. Raises OSError."""
    with open(path, "rb") as file:
        end = position = file.seek(0, os.SEEK_END)
        floor = max(0, end - MAX_BEHIND_BYTES) if lines > 0 else end
        while position > floor:
            size = min(BLOCK_BYTES, position - floor)
            position = file.seek(position - size)
            block = file.read(size)
            at = len(block) - (position + size == end and block.endswith(b"\n"))
            while (at := block.rfind(b"\n", 0, at)) >= 0:
                lines -= 1
                if lines <= 0:
                    return position + at + 1
        return floor


def _start_of_time(path: Path, rank: int, descriptor: int, since: float) -> int:
    """Return where a file has what was printed since a time. Raises OSError."""
    found = os.stat(path)
    if found.st_mtime < since:
        return found.st_size
    start, key = 0, [b"%d" % rank, b"%d" % descriptor]
    with contextlib.suppress(FileNotFoundError, ValueError), open(path.with_name(TIMES), "rb") as file:
        for at, *noted, position in (words for line in file if len(words := line.split()) == 4):
            if noted == key and float(at) <= since:
                start = int(position)
    return min(start, found.st_size)
