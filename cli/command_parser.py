"""Argument parser of the subcommands: a wrong argument is a one-line error with exit code 2, like every other
usage error. Used by every subcommand.
"""

from __future__ import annotations

import argparse
from typing import NoReturn

from grpo_run.runtime.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """Argument parser that raises `UsageError` instead of printing the usage and exiting."""

    def add_run(self) -> None:
        """Add the argument that names a run."""
        self.add_argument(
            "run", nargs="?", help="run directory or run id (default: the newest run under runs/)"
        )

    def error(self, message: str) -> NoReturn:
        """Raise the one line that the user sees."""
        raise UsageError(f"{message} (see {self.prog} --help)")
