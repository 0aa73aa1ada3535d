"""Which run a command is about: the one rule of all commands, and the question where several are active.

`runtime/catalog.py` has the rule. Called by every command that takes a run; only the terminal is asked.
"""

from __future__ import annotations

import sys

from grpo_run.runtime.catalog import SeveralRunsError, find_run
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.run_directory import RunDirectory


def which_run(name: str | None) -> RunDirectory:
    """Return the run that is meant; on a terminal, the user chooses among several.

    Raises:
        RunDirectoryError: there is no such run, or several, and nobody can be asked.
    """
    try:
        return find_run(name)
    except SeveralRunsError as error:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise
        for number, path in enumerate(error.paths, 1):
            print(f"  {number}  {path}", file=sys.stderr)
        print(f"{error.what}; which one (1 to {len(error.paths)})? ", end="", file=sys.stderr, flush=True)
        answer = sys.stdin.readline().strip()
        if not (answer.isdecimal() and 1 <= int(answer) <= len(error.paths)):
            raise UsageError("no run was chosen") from None
        return RunDirectory(path=error.paths[int(answer) - 1])
