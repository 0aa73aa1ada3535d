"""A program in a pseudo-terminal of 80 columns, and what its screen shows."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte

SECONDS = 60.0
COLUMNS, ROWS = 80, 24
LINES_ABOVE = 2000


class Terminal:
    """A pseudo-terminal with a program, and what its screen shows."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._screen = pyte.HistoryScreen(COLUMNS, ROWS, history=LINES_ABOVE)
        self._stream = pyte.ByteStream(self._screen)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._descriptor, keys)

    def wait(self, shown: Callable[[str], bool], keys: bytes = b"", seconds: float = SECONDS) -> str:
        """Return the screen as soon as it shows something; press keys once a second until then."""
        typed_at, deadline = 0.0, time.monotonic() + seconds
        while True:
            text = "\n".join(self._screen.display)
            if shown(text):
                return text
            assert time.monotonic() < deadline, text
            if keys and time.monotonic() - typed_at > 1:
                typed_at = time.monotonic()
                self.type(keys)
            if select.select([self._descriptor], [], [], 0.2)[0]:
                self._stream.feed(os.read(self._descriptor, 65536))

    def all_lines(self, seconds: float = SECONDS) -> list[str]:
        """Return what the program has left on the terminal when it has ended, also above the screen."""
        deadline = time.monotonic() + seconds
        while True:
            assert time.monotonic() < deadline, "the program has not ended"
            if select.select([self._descriptor], [], [], 0.2)[0]:
                try:
                    self._stream.feed(os.read(self._descriptor, 65536))
                except OSError:  # EIO: nobody has the other end open
                    break
        above = ["".join(row[column].data for column in range(COLUMNS)) for row in self._screen.history.top]
        return [line.rstrip() for line in [*above, *self._screen.display]]


@contextmanager
def terminal(command: list[str], cwd: Path) -> Iterator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run a program in a terminal of its own."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": str(cwd / "state")}
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=its, stdout=its, stderr=its, start_new_session=True
    )
    os.close(its)
    try:
        yield Terminal(ours), process
    finally:
        process.kill()
        process.wait()
        os.close(ours)
