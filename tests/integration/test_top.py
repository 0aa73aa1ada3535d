"""`grpo-run top` in a real terminal of 80 columns, beside a real run."""

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
from support.runs import BIN, SCRIPTS, Runs

SECONDS = 60.0
COLUMNS, ROWS = 80, 24


class Terminal:
    """A pseudo-terminal with a program, and what its screen shows."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._screen = pyte.Screen(COLUMNS, ROWS)
        self._stream = pyte.ByteStream(self._screen)

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._descriptor, keys)

    def wait(self, shown: Callable[[str], bool], keys: bytes = b"") -> str:
        """Return the screen as soon as it shows something; press keys once a second until then."""
        typed_at, deadline = 0.0, time.monotonic() + SECONDS
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


def test_a_run_is_followed_in_a_terminal(runs: Runs, tmp_path: Path) -> None:
    """The step advances, the stacks of a rank are read on request, and the run goes on undisturbed."""
    run = runs(
        "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", "out", "--max-steps", "400",
        "--step-seconds", "0.1",
    ).start()  # fmt: skip
    run.until_step(2)
    with terminal([str(BIN / "grpo-run"), "top", str(run.directory)], tmp_path) as (screen, process):
        text = screen.wait(lambda text: " of 400" in text and "goodput" in text)
        assert "running" in text
        step = int(text.partition(" of 400")[0].split()[-1])
        screen.wait(lambda text: int(text.partition(" of 400")[0].split()[-1] or 0) > step)
        screen.wait(lambda text: "choose a rank" in text, b"s")
        screen.type(b"\x1b[B")
        screen.wait(lambda text: "py-spy took" in text and "not paused" in text, b"s")
        screen.type(b"q")
        assert process.wait(SECONDS) == 0
    assert run.process.poll() is None
