"""Another live launch of the same run, with a run directory of its own, that trains into the same output directory.

Each of the two would take the other's checkpoints for its own, go on from them and delete them. Called in rank 0 by
`trainers.calls.resume` before a call looks for checkpoints. Reads only; does not see launches whose registry is
elsewhere (another user or machine).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from grpo_run.runtime.continuity.held import output_directories
from grpo_run.runtime.errors import RunDirectoryError, UsageError
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import read_status


def refuse_duplicate(run_id: str, own: Path, output_dir: str, registered: Iterable[Path]) -> None:
    """Check that no other live launch of a run trains into an output directory.

    Args:
        run_id: of the run.
        own: its run directory.
        output_dir: of the call that begins.
        registered: run directories of this user.

    Raises:
        UsageError: there is one.
    """
    wanted = os.path.realpath(output_dir)
    for path in registered:
        other = RunDirectory(path=path)
        if path.resolve() == own.resolve():
            continue
        supervisor = other.supervisor()
        if supervisor is None:
            continue
        try:
            if other.read_run().get("run_id") != run_id:
                continue
            calls = read_status(other).history.calls
        except (RunDirectoryError, OSError):
            continue  # being written or deleted: it has no checkpoints yet, or no more
        if wanted in output_directories(calls):
            raise UsageError(
                f"output directory {output_dir}: run {run_id} is live in {path} (pid {supervisor.pid}) and trains into"
                " it; stop that launch, or give this one an output directory of its own and a --run-id"
            )
