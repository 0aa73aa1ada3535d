"""Argument parser of the subcommands: a wrong argument is a one-line error with exit code 2, like every other
usage error. Used by every subcommand.
"""

from __future__ import annotations

import argparse
from typing import Any, ClassVar, NoReturn

from grpo_run.runtime.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError` instead of printing the usage and exiting."""

    made: ClassVar[list[CommandParser]] = []
    """All that were made in this process, for who wants to know what they declare."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made.append(self)

    def add_run(self, kinds: str = "run directory or run id") -> None:
        """Add the argument that names a run."""
        self.add_argument(
            "run",
            nargs="?",
            metavar="RUN",
            help=f"{kinds}; an id may be shortened (default: the active run under runs/, or the last one that"
            " has trained)",
        )

    def error(self, message: str) -> NoReturn:
        """Raise the one line that the user sees."""
        raise UsageError(f"{message} (see {self.prog} --help)")
