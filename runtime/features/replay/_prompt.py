"""The prompt of `grpo-run replay --shell`, in a rank on the user's terminal. Called by `rank.py`."""

from __future__ import annotations

import code
import contextlib
import os
import sys
from typing import Any


def interact(terminal: str, names: dict[str, Any], banner: str) -> None:
    """Let the user look at objects, until Ctrl-D or `exit()`.

    Args:
        terminal: path of its device.
        names: of the objects.
    """

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOCTTY)

    def read(prompt: str = "") -> str:
        print(prompt, end="", file=sys.stderr, flush=True)
        if not (line := reader.readline()):
            raise EOFError
        return line.rstrip("\n")

    with (
        open(terminal, opener=opener) as reader,
        open(terminal, "w", opener=opener) as writer,
        contextlib.redirect_stdout(writer),
        contextlib.redirect_stderr(writer),
        contextlib.suppress(SystemExit),
    ):
        # the terminal is not this process's standard input
        code.interact(banner, read, names, exitmsg="")
