"""What ranks print, carried from their files to the terminal, a prefix a line.

A thread of the supervisor follows the files of the present attempt and hands whole lines to a printer.
The files are written by the ranks themselves, so nothing is lost when the supervisor is slow or gone.
Does not parse or colour.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

POLL_SECONDS = 0.1
MAX_READ_BYTES = 256 * 1024
MAX_LINE_BYTES = 16 * 1024


class Follower:
    """Follows one file, by lines; a carriage return ends a line that a newer one overwrites."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = 0
        self._rest = b""

    def read(self) -> list[str]:
        """Whole lines that have come since the last call."""
        try:
            if os.stat(self._path).st_size == self._position:
                return []  # asked ten times a second, a rank: a file that has not grown is not opened
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read(MAX_READ_BYTES)
        except FileNotFoundError:
            return []
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = self._rest.rpartition(b"\r")[2][-MAX_LINE_BYTES:]
        return [line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace") for line in lines]

    def all(self) -> list[str]:
        """Whole lines up to the file's present end, however many reads that takes."""
        lines: list[str] = []
        while True:
            before = self._position
            lines += self.read()
            if self._position == before:
                return lines

    def rest(self) -> list[str]:
        """What is left without a newline at the end."""
        rest, self._rest = self._rest.rstrip(b"\r").rpartition(b"\r")[2], b""
        return [rest.decode(errors="replace")] if rest else []


class OutputFollower:
    """The thread. `follow` names the files of a new attempt; `drain` shows what is left of the old ones.

    Args:
        printer: called with (rank, line) in the thread, or in the caller's for `drain`.
    """

    def __init__(self, printer: Callable[[int, str], None]) -> None:
        self._printer = printer
        self._followers: dict[int, Follower] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True, name="grpo-run-output")

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def follow(self, files: Mapping[int, Path]) -> None:
        """Show these from here on, by rank."""
        self.drain()
        with self._lock:
            self._followers = {rank: Follower(path) for rank, path in files.items()}

    def drain(self) -> None:
        """Show everything that has been written."""
        with self._lock:
            for rank, follower in self._followers.items():
                self._show(rank, follower.all())
                self._show(rank, follower.rest())

    def stop(self) -> None:
        """Drain and end the thread."""
        self._stop.set()
        self._thread.join(5.0)
        self.drain()

    def _loop(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            with self._lock:
                for rank, follower in self._followers.items():
                    self._show(rank, follower.read())

    def _show(self, rank: int, lines: list[str]) -> None:
        for line in lines:
            self._printer(rank, line)
