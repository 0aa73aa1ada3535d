"""The id and the directory of a run: where the same command finds its run again. Called by `parse.py`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import read_journal
from grpo_run.runtime.record.run_directory import DEFAULT_ROOT, RunDirectory, default_run_id


def locate(options: argparse.Namespace, command: Sequence[str], nodes: int) -> tuple[str, Path]:
    """Return the run's id and directory.

    With `--fresh`, and if the newest run of this command has finished, both get the next number of the
    series.

    Args:
        options: the parsed command line.
        command: the words that identify the run.
        nodes: the largest number of nodes; with several, the node's name is part of the directory's name.

    Raises:
        UsageError: the id is not a plain name, or `--fresh` contradicts `--run-dir`.
    """
    base = options.run_id or default_run_id(options.training_script, command)
    if "/" in base or base in ("", ".", ".."):
        raise UsageError(f"--run-id {base!r}: give a name without slashes")
    if options.run_dir:
        path = Path(options.run_dir)
        if options.fresh and _has_finished(path):
            raise UsageError(f"--fresh: the run in --run-dir {path} has finished; give another directory")
        return base, path
    suffix = "" if nodes == 1 else f"-{os.uname().nodename}"
    run_id, number = base, 1
    while (other := RunDirectory(path=DEFAULT_ROOT / f"{base}-{number + 1}{suffix}")).run_json.is_file():
        number += 1
        if other.read_run().get("command") == list(
            command
        ):  # otherwise a run that was named so with --run-id
            run_id = f"{base}-{number}"
    path = DEFAULT_ROOT / f"{run_id}{suffix}"
    if options.fresh and _has_finished(path):
        run_id = f"{base}-{number + 1}"
        path = DEFAULT_ROOT / f"{run_id}{suffix}"
    return run_id, path


def _has_finished(path: Path) -> bool:
    return History.of(read_journal(RunDirectory(path=path).journal)).finished
