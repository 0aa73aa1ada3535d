"""The registry of run directories.

    $XDG_STATE_HOME/grpo-run/runs/9f86d081884c7d65      ~/.local/state by default, mode 0700; one file per run

Every launch writes its entry under a name that follows from the path. The registry is an index only: an
entry without a run directory is ignored, and a run without an entry is found in `runs/`. Called by
`grpo-run launch` and `catalog.py`.

Launches whose registry is elsewhere (another user or machine) are not seen. Deletes no run.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from grpo_run.runtime.files import replace_file

MAX_ENTRIES = 1000
"""The entries launched last are kept; `ls` shows no more runs than a person can read."""
MAX_PATH_BYTES = 4096
"""PATH_MAX of Linux."""


def registry_folder() -> Path | None:
    """Return the folder of the registry; None if the user has no home directory."""
    return _state_folder("runs")


def targets_folder() -> Path | None:
    """Return the folder in which runs announce their metrics to Prometheus; None as `registry_folder`."""
    return _state_folder("targets")


def _state_folder(name: str) -> Path | None:
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):  # the specification: a relative path is ignored
        return Path(state) / "grpo-run" / name
    try:
        return Path.home() / ".local" / "state" / "grpo-run" / name
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
