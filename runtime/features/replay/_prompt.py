"""The prompt of `grpo-run replay --shell`, in a rank on the user's terminal. Called by `rank.py`."""

from __future__ import annotations

import code
import contextlib
import os
import sys
from typing import Any, TextIO


class _Console(code.InteractiveConsole):
    """Reads from a terminal that is not this process's standard input."""

    def __init__(self, names: dict[str, Any], reader: TextIO) -> None:
        super().__init__(names)
        self._reader = reader

    def raw_input(self, prompt: str = "") -> str:
        """Return one line."""
        print(prompt, end="", file=sys.stderr, flush=True)
        line = self._reader.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")


def interact(terminal: str, names: dict[str, Any], banner: str) -> None:
    """Let the user look at objects, until Ctrl-D or `exit()`.

    Args:
        terminal: path of its device.
        names: of the objects.
    """

    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOCTTY)

    with (
        open(terminal, opener=opener) as reader,
        open(terminal, "w", opener=opener) as writer,
        contextlib.redirect_stdout(writer),
        contextlib.redirect_stderr(writer),
        contextlib.suppress(SystemExit),
    ):
        _Console(names, reader).interact(banner, exitmsg="")
