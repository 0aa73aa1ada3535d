"""The id and the directory of a run: where the same command finds its run again. Called by `parse.py`.

Checkpoints are found by the run's id, so a new run needs an id that no earlier run of the command has.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.run_directory import DEFAULT_ROOT, RunDirectory, default_run_id

MAX_SHOWN_CHARACTERS = 200
"""Of the recorded command in a message."""


STARTS_OVER = "starts_over"
"""Field of `run.json`: how many runs of the command before this one could not be resumed."""


class RunLocation(NamedTuple):
    """A run's id and directory. `series` is the id without the number that `--fresh` appends."""

    series: str
    run_id: str
    directory: Path

    @property
    def starts_over(self) -> int:
        """How many runs before the one in this directory could not be resumed."""
        run = RunDirectory(path=self.directory)
        return int(run.read_run().get(STARTS_OVER) or 0) if run.run_json.is_file() else 0


def locate(
    options: argparse.Namespace, command: Sequence[str], nodes: int, token: str, *, starts_over: bool = False
) -> RunLocation:
    """Return where the run of a command is.

    The newest run of the same command is continued. With `--fresh`, the next number of its series is a new run. In a
    directory of the user's choice the numbers are not known: there a new run is named by `--run-id`, or with the token.

    Args:
        options: the parsed command line.
        command: the words that identify the run.
        nodes: the largest number of nodes; with several, the node's name is part of the directory's name.
        token: random; part of the id of a new run in a directory of the user's choice.
        starts_over: a new run follows one that could not be resumed; in a directory of the user's choice it is in the next
            one of this name.

    Raises:
        UsageError: the id is not a plain name, the directory belongs to another command, or `--fresh` cannot be
            obeyed.
    """
    # of the script's own name, also if it is started through a link
    base = options.run_id or default_run_id(command[1] if command[0] == "-m" else command[0], command)
    if "/" in base or base in ("", ".", ".."):
        raise UsageError(f"--run-id {base!r}: give a name without slashes")
    if options.run_dir:
        path, after = _newest(Path(options.run_dir), command)
        if starts_over:
            return RunLocation(base, f"{base}-{token}", after)
        recorded = _recorded(RunDirectory(path=path), command, "--run-dir")
        if recorded is not None and options.fresh:
            raise UsageError(f"--fresh: there is a run in --run-dir {path}; give another directory")
        if options.fresh and not options.run_id:
            if nodes > 1:
                raise UsageError(
                    "--fresh --run-dir on several nodes: they cannot choose the new run's id by themselves; give one that"
                    " is new with --run-id, the same on every node"
                )
            return RunLocation(base, f"{base}-{token}", path)
        started_over = recorded if path != Path(options.run_dir) else None
        return RunLocation(base, started_over or options.run_id or recorded or base, path)
    suffix = "" if nodes == 1 else f"-{os.uname().nodename}"
    run_id, number = base, 1
    while (other := RunDirectory(path=DEFAULT_ROOT / f"{base}-{number + 1}{suffix}")).run_json.is_file():
        number += 1
        run = other.read_run()
        # otherwise a run that was named so with --run-id
        if run.get("command") == list(command) and run.get("series", base) == base:
            run_id = f"{base}-{number}"
    directory = RunDirectory(path=DEFAULT_ROOT / f"{run_id}{suffix}")
    if _recorded(directory, command, "--run-id") is not None and (options.fresh or starts_over):
        owner = directory.owner()
        if owner is not None:
            raise UsageError(f"--fresh: run {run_id} of this command is running (pid {owner}); stop it first")
        run_id = f"{base}-{number + 1}"
        directory = RunDirectory(path=DEFAULT_ROOT / f"{run_id}{suffix}")
    return RunLocation(base, run_id, directory.path)


def _newest(path: Path, command: Sequence[str]) -> tuple[Path, Path]:
    """Return the directory of the newest run that has started over after the one in `path`, and of the next such run."""
    newest, number = path, 2
    while True:
        after = path.with_name(f"{path.name}-{number}")
        run = RunDirectory(path=after)
        fields = run.read_run() if run.run_json.is_file() else {}
        if fields.get("command") != list(command) or not fields.get(STARTS_OVER):
            return newest, after
        newest, number = after, number + 1


def _recorded(directory: RunDirectory, command: Sequence[str], option: str) -> str | None:
    """Return the id of the run in a directory; None if there is none.

    Raises:
        UsageError: it is a run of another command.
    """
    if not directory.run_json.is_file():
        return None
    run = directory.read_run()
    recorded = run.get("command")
    if recorded != list(command):
        words = shlex.join(recorded) if isinstance(recorded, list) else "an unknown command"
        raise UsageError(
            f"{directory.path} holds run {run.get('run_id')} of another command ({_shortened(words)}); give another"
            f" {option}"
        )
    return str(run["run_id"])


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 1] + "…"
