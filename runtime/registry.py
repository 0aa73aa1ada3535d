"""The registry of run directories, and other live launches of the same run.

    $XDG_STATE_HOME/grpo-run/runs/9f86d081884c7d65      ~/.local/state by default, mode 0700; one file per run

Every launch writes its entry under a name that follows from the path. The registry is an index only: an
entry without a run directory is ignored, and a run without an entry is found in `runs/`. Called by
`grpo-run launch` and `catalog.py`.

`refuse_duplicate` finds another live launch of the same run, with its own run directory, that trains into
the same output directory: each of the two would resume from and delete the other's checkpoints. Rank 0
calls it before a call looks for checkpoints (`runtime/rank/step/resume.py`). Launches whose registry is
elsewhere (another user or machine) are not seen. Deletes no run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from grpo_run.runtime.errors import RunDirectoryError, UsageError
from grpo_run.runtime.files import replace_file
from grpo_run.runtime.history.checkpoint_backups import output_directories
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import read_status

MAX_ENTRIES = 1000
"""The entries launched last are kept; `ls` shows no more runs than a person can read."""
MAX_PATH_BYTES = 4096
"""PATH_MAX of Linux."""


def registry_folder() -> Path | None:
    """Return the folder of the registry; None if the user has no home directory."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the specification: a relative path is ignored
        return Path(state) / "grpo-run" / "runs"
    try:
        return Path.home() / ".local" / "state" / "grpo-run" / "runs"
    except RuntimeError:
        return None


def register(run_directory: Path, folder: Path | None) -> bool:
    """Write the entry of a run directory, and remove the oldest entries over `MAX_ENTRIES`.

    Returns:
        whether it could be written. A home directory that cannot be written is no reason not to train.
    """
    if folder is None:
        return False
    path = os.fsencode(run_directory.resolve())
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        entry = folder / _name(path)
        replace_file(entry, path)
        for old in _newest_first(folder)[MAX_ENTRIES:]:
            old.unlink(missing_ok=True)
    except OSError:
        return False
    return True


def forget(run_directory: Path, folder: Path | None) -> None:
    """Remove the entry of a run directory, if there is one."""
    if folder is not None:
        with suppress(OSError):  # without its directory, the entry is ignored
            (folder / _name(os.fsencode(run_directory.resolve()))).unlink(missing_ok=True)


def registered(folder: Path | None) -> list[Path]:
    """Return the registered run directories, launched last first. They may not exist any more."""
    if folder is None:
        return []
    found = []
    for entry in _newest_first(folder)[:MAX_ENTRIES]:
        with suppress(OSError):
            with open(entry, "rb") as file:
                path = file.read(MAX_PATH_BYTES)
            if path.startswith(b"/") and _name(path) == entry.name:
                found.append(Path(os.fsdecode(path)))
    return found


def _name(path: bytes) -> str:
    return hashlib.sha256(path).hexdigest()[:16]


def _newest_first(folder: Path) -> list[Path]:
    try:
        entries = [(entry.stat().st_mtime_ns, entry.name) for entry in os.scandir(folder)]
    except OSError:
        return []
    return [folder / name for _, name in sorted(entries, reverse=True) if not name.startswith(".")]


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
