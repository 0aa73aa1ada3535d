"""Assign a staging area to a run, and lock it for the lifetime of the supervisor.

`run.json` holds the path of the area. Every supervisor gives it a new name, so a path is used by one supervisor
only: a copy of the run directory, or a run directory that was used on another machine meanwhile, does not find
snapshots that are not its own. Called by `cli/launch.py`, under the lock of the run directory.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.staging.ownership.folder import new_area_path
from grpo_run.runtime.staging.ownership.owner import (
    LOCK_WAIT_SECONDS,
    AreaOwner,
    lock_area,
    needs_area,
    read_owner,
    write_owner,
)

LOCK_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class LockedArea:
    """An area of this run, and the descriptor that holds its lock. The caller closes it."""

    path: Path
    lock: int


def find_area(recorded: Sequence[Path], owner: AreaOwner) -> LockedArea | None:
    """Lock and return the first recorded area that exists and is this run's; None if there is none.

    Args:
        recorded: the paths in `run.json`, newest first.
        owner: this run.
    """
    for path in recorded:
        known = read_owner(path)
        if known is None or _is_of_the_original(path, known, owner):
            continue
        lock = lock_area(path, LOCK_WAIT_SECONDS)
        if lock is not None:
            return LockedArea(path=path, lock=lock)
    return None


def _is_of_the_original(area: Path, known: AreaOwner, owner: AreaOwner) -> bool:
    """Whether this run directory is a copy of another one that still exists and needs the area."""
    if not known.path_is_valid_here or known.run_directory == owner.run_directory:
        return False
    try:
        return needs_area(known.directory, area)
    except (OSError, ValueError, TypeError):
        return False  # moved here


def take_area(
    folder: Path, found: LockedArea | None, owner: AreaOwner, record: Callable[[Path, Path | None], None]
) -> LockedArea:
    """Return the run's locked area in `folder`: the one found, under a new name, or a new one.

    Args:
        folder: this user's folder in memory (`folder.private_folder`).
        found: the result of `find_area`; it must be in `folder`.
        owner: this run.
        record: called with the new path and the path of `found` before anything is renamed; writes both to
            `run.json`, so that a supervisor that is killed at any moment leaves an area that can be found.

    Raises:
        OSError: the area cannot be created.
    """
    path = new_area_path(folder)
    record(path, found.path if found is not None else None)
    if found is not None:
        os.rename(found.path, path)
        lock = found.lock
    else:
        path.mkdir(mode=0o700)
        lock = _lock_new(path)
    write_owner(path, owner)
    _remove_earlier(path, owner)
    return LockedArea(path=path, lock=lock)


def _lock_new(path: Path) -> int:
    """Lock an area that was just created. `gc` may look at it first, or remove it as long as it is empty."""
    for _ in range(LOCK_ATTEMPTS):
        lock = lock_area(path, LOCK_WAIT_SECONDS)
        if lock is not None:
            return lock
        path.mkdir(mode=0o700, exist_ok=True)
    raise OSError(errno.EBUSY, "the new staging area cannot be locked", str(path))


def _remove_earlier(present: Path, owner: AreaOwner) -> None:
    """Remove areas that this run left here before it continued on another machine.

    The caller holds the lock of the run directory, so an area of the same directory is not another run's.
    """
    for path in present.parent.iterdir():
        known = read_owner(path) if path != present else None
        if known is None or not known.path_is_valid_here or known.run_directory != owner.run_directory:
            continue
        lock = lock_area(path)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
