"""Prints without training: much, without pauses or newlines, to both streams, and to the end of the process.

printing.py mass        32 MB of any bytes, with a line of 20 MB; killed once after the last of it
printing.py turns       lines to standard output and standard error in turns
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

TURNS = 40


def mass() -> bytes:
    """The same bytes in every process."""
    source = random.Random(4)
    line = b"x" * (20 << 20)
    return (
        b"begins\n" + source.randbytes(6 << 20) + line + b"\n" + b"a line\n" * 800_000 + b"\r 7%|\rno newline"
    )


def main() -> None:
    if sys.argv[1] == "turns":
        for number in range(TURNS):
            print(number, file=(sys.stdout, sys.stderr)[number % 2])
        return
    view = memoryview(mass())
    while view:
        view = view[os.write(1, view) :]
    if not Path("killed").exists():
        Path("killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
