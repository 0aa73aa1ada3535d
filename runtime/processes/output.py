"""Follows the output files of ranks and passes on what they print: lines to a terminal, bytes to a pipe or a
file.

A thread of the supervisor reads the files of the present attempt. The ranks write the files themselves, so no
output is lost if the supervisor is slow or exits, and nothing has to be kept for a reader that is slow. Does
not parse or colour lines. `FileFollower` is also what `dashboards/rank_logs.py` reads with, for commands and
the live page; `TIMES` tells it what was printed when.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

POLL_SECONDS = 0.2
"""Time between two looks at a file that has grown lately."""
QUIET_POLL_SECONDS = 0.5
"""Time between two looks at the other files: a look at one costs about 10 µs, and most ranks print nothing.
"""
ACTIVE_SECONDS = 2.0
"""A file has grown lately within this time."""
MAX_READ_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 1024
MAX_BEHIND_BYTES = 8 * 1024 * 1024
"""Output that is further behind is not printed; the file has it."""
BEGUN_SECONDS = 1.0
"""A line that a rank has begun, such as a question or a progress bar, is passed on as it is after this time.
"""
TIMES = "output.times"
"""File of an attempt: lines of seconds since the epoch, rank, descriptor, and up to where in the rank's file
there were lines then.
"""
TIMES_SECONDS = 15.0
STOP_SECONDS = 5.0
"""How long to wait for the thread when the run ends."""


class FileFollower:
    """Follows one file. What is passed on ends with a line, unless a line is long or its end does not come.

    For a reader of bytes, a state of a progress bar begins with its carriage return and counts as a line. For
    one of lines, text before a carriage return is dropped, as a terminal would overwrite it, and a file that
    grows faster than it is read is continued near its end. A file that was truncated or replaced is read from
    its beginning.

    Args:
        path: of the file.
        by_lines: for a reader of lines.
        start: where to begin in it.
        whole: leave nothing out, however far behind.
    """

    def __init__(self, path: Path, *, by_lines: bool = False, start: int = 0, whole: bool = False) -> None:
        self.by_lines = by_lines
        self.path = path
        self._whole = whole
        self._position = start
        self._inode = 0
        self._begun = b""
        self._grew_at = -math.inf

    @property
    def line_start(self) -> int:
        """Where in the file the first line begins that was not passed on."""
        return self._position - len(self._begun)

    @property
    def is_active(self) -> bool:
        """Whether anything was read lately."""
        return time.monotonic() - self._grew_at < ACTIVE_SECONDS

    def read(self) -> bytes:
        """Return what may be passed on of at most `MAX_READ_BYTES` that were appended since the last call."""
        try:
            found = os.stat(self.path)
            size = found.st_size
            if size < self._position or self._inode not in (0, found.st_ino):
                self._position, self._begun = 0, b""
            self._inode = found.st_ino
            skipped = self._skip_to(size) if self.by_lines and not self._whole else 0
            data = b""
            if size > self._position:  # called often: do not open a file that has not grown
                with open(self.path, "rb") as file:
                    file.seek(self._position)
                    data = file.read(MAX_READ_BYTES)
        except OSError:  # not there yet, or no descriptor is left: the next call reads it
            return b""
        self._position += len(data)
        if data:
            self._grew_at = time.monotonic()
        if skipped:
            note = f"... {skipped / 1e6:.0f} MB of output are in {self.path} only\n".encode()
            data = note + data.partition(b"\n")[2]
        text = self._begun + data
        end = text.rfind(b"\n") + 1
        if not self.by_lines:
            end = max(end, text.rfind(b"\r"))
            waits_too_long = not data and time.monotonic() - self._grew_at > BEGUN_SECONDS
            if len(text) - end > MAX_LINE_BYTES or waits_too_long:
                end = len(text)
        self._begun = text[end:]
        if len(self._begun) > MAX_LINE_BYTES:
            self._begun = self._begun.rpartition(b"\r")[2][-MAX_LINE_BYTES:]
        return text[:end]

    def read_lines(self) -> list[str]:
        """Return the complete lines of `read`, each as a terminal would leave it."""
        lines = self.read().split(b"\n")[:-1]
        return [_overwritten(line) for line in lines]

    def read_all_lines(self) -> Iterator[str]:
        """Yield lines up to the present end of the file, at most `MAX_BEHIND_BYTES` of it; the last one as it
        is.
        """
        before = -1
        while self._position != before:
            before = self._position
            yield from self.read_lines()
        begun, self._begun = self._begun, b""
        if last := begun.rstrip(b"\r"):
            yield _overwritten(last)

    def take_rest(self) -> tuple[bytes, Path, int]:
        """Return the line that was begun, and where in which file the rest begins. Nothing more is read."""
        begun, self._begun = self._begun, b""
        return begun, self.path, self._position

    def _skip_to(self, size: int) -> int:
        """Skip what is too far behind the end of the file. Returns the number of bytes skipped."""
        behind = size - self._position
        if behind <= MAX_BEHIND_BYTES:
            return 0
        self._position = size - MAX_BEHIND_BYTES
        self._begun = b""
        return behind - MAX_BEHIND_BYTES


def _overwritten(line: bytes) -> str:
    """What a terminal shows of a line after its carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class Printer(Protocol):
    """Prints what is followed, in the thread of the follower or in the one that calls `drain`."""

    def rank_line(self, rank: int, descriptor: int, line: str) -> None:
        """Print one line of a rank's output to descriptor 1 or 2."""

    def rank_bytes(self, rank: int, descriptor: int, data: bytes) -> None:
        """Pass on what a rank has printed."""

    def rank_file(self, rank: int, descriptor: int, path: Path, start: int) -> None:
        """Pass on a file from a position to its end, as its reader takes it."""

    def takes_bytes(self, descriptor: int) -> bool:
        """Whether bytes are passed on, and not lines."""

    def has_room(self, descriptor: int) -> bool:
        """Whether the reader has taken most of what was passed on."""


class OutputFollower:
    """Thread that follows the output files of all ranks of an attempt."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._followers: dict[tuple[int, int], FileFollower] = {}
        self._noted: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="grpo-run-output")

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def follow(self, files: Mapping[tuple[int, int], Path]) -> None:
        """Print what remains of the files followed so far, then follow these.

        Args:
            files: of a new attempt, by rank and descriptor.
        """
        self.drain()
        with self._lock:
            self._noted = {}
            self._followers = {
                stream: FileFollower(path, by_lines=not self._printer.takes_bytes(stream[1]))
                for stream, path in files.items()
            }

    def drain(self) -> None:
        """Print everything that has been written, including last lines without a newline. The ranks have
        ended.
        """
        with self._lock:
            for (rank, descriptor), follower in self._followers.items():
                if follower.by_lines:
                    for line in follower.read_all_lines():
                        self._printer.rank_line(rank, descriptor, line)
                    continue
                self._pass_on(rank, descriptor, follower)
                begun, path, position = follower.take_rest()
                self._printer.rank_bytes(rank, descriptor, begun)
                self._printer.rank_file(rank, descriptor, path, position)
            self._followers = {}

    def stop(self) -> None:
        """Stop the thread and print what remains."""
        self._stop.set()
        self._thread.join(STOP_SECONDS)
        self.drain()

    def _loop(self) -> None:
        all_due_at = note_at = time.monotonic()
        while True:
            all_due = time.monotonic() >= all_due_at
            if all_due:
                all_due_at = time.monotonic() + QUIET_POLL_SECONDS
            with self._lock:
                for (rank, descriptor), follower in self._followers.items():
                    if all_due or follower.is_active:
                        self._pass_on(rank, descriptor, follower)
                active = any(follower.is_active for follower in self._followers.values())
                if time.monotonic() >= note_at:
                    note_at = time.monotonic() + TIMES_SECONDS
                    self._note_times()
            pause_seconds = POLL_SECONDS if active else max(0.0, all_due_at - time.monotonic())
            if self._stop.wait(pause_seconds):
                return

    def _note_times(self) -> None:
        """Append to `TIMES` how far each file has been read, if it has grown."""
        for (rank, descriptor), follower in self._followers.items():
            if self._noted.get(follower.path, 0) == follower.line_start:
                continue
            self._noted[follower.path] = follower.line_start
            line = f"{time.time():.0f} {rank} {descriptor} {follower.line_start}\n"
            with contextlib.suppress(OSError), open(follower.path.with_name(TIMES), "a") as file:
                file.write(line)  # without it, `--since` shows more

    def _pass_on(self, rank: int, descriptor: int, follower: FileFollower) -> None:
        """Pass on what a rank has printed. Of bytes, as much as the reader takes; the file keeps the rest."""
        if follower.by_lines:
            for line in follower.read_lines():
                self._printer.rank_line(rank, descriptor, line)
            return
        while self._printer.has_room(descriptor) and (data := follower.read()):
            self._printer.rank_bytes(rank, descriptor, data)
