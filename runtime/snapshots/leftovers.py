"""List the staging areas of this user, and remove one that no run needs. Called by `grpo-run gc`.

An area may be removed only if no supervisor holds its lock, it was made in this mount namespace, and its run
directory is gone or has another area. Whatever cannot be shown to be unneeded is kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import SHARED_MEMORY_ROOT, tree_bytes
from grpo_run.runtime.snapshots.ownership import (
    AREA_NAME,
    AreaOwner,
    lock_area,
    needs_area,
    private_folders,
    read_owner,
)
from grpo_run.runtime.snapshots.slot import StagingSlot, path_of


@dataclass(frozen=True, kw_only=True)
class AreaEntry:
    """One staging area.

    Attributes:
        owner: its run; None if the area has no record, or one of an earlier release.
        made_here: it was made in the mount namespace of this process.
        locked: a supervisor uses it.
        size_bytes: memory that its files use.
        modified_at: when it was changed last, in seconds since the epoch.
        kept_because: why it is not removed; None if it may be.
        unsaved: checkpoints that must reach a disk and that only this area has.
    """

    path: Path
    owner: AreaOwner | None
    made_here: bool
    locked: bool
    size_bytes: int
    modified_at: float
    kept_because: str | None
    unsaved: tuple[Path, ...] = ()

    @property
    def removable(self) -> bool:
        """Whether `remove_area` would remove it."""
        return self.kept_because is None


def list_areas(root: Path = SHARED_MEMORY_ROOT, *, disks_are_mounted: bool = False) -> list[AreaEntry]:
    """Return every staging area of this user, oldest first. Changes nothing.

    Args:
        root: where the memory-backed file system is mounted.
        disks_are_mounted: the user says that a missing folder was deleted, and is not on an unmounted disk.
    """
    found = []
    for folder in private_folders(root):
        for path in folder.iterdir():
            if not path.is_dir() or path.is_symlink():
                continue
            lock = lock_area(path)
            if lock is not None:
                os.close(lock)
            try:
                found.append(_describe(path, locked=lock is None, disks_are_mounted=disks_are_mounted))
            except FileNotFoundError:
                continue  # its run has ended meanwhile
    return sorted(found, key=lambda entry: entry.modified_at)


def remove_area(
    path: Path, report: Callable[[str], None] = lambda sentence: None, *, disks_are_mounted: bool = False
) -> int | None:
    """Remove an area if it may be removed now, judged again under its lock.

    Args:
        report: called with the reason if the area is kept.
        disks_are_mounted: as of `list_areas`.

    Returns:
        the bytes that were freed; None if the area is kept.
    """
    lock = lock_area(path)
    if lock is None:
        report("its run is alive" if path.exists() else "it is gone")
        return None
    try:
        entry = _describe(path, locked=False, disks_are_mounted=disks_are_mounted)
        if entry.kept_because is not None:
            report(entry.kept_because)
            return None
        shutil.rmtree(path)
    except OSError as error:
        report(f"it cannot be removed: {error.strerror}")
        return None
    finally:
        os.close(lock)
    return entry.size_bytes


def _describe(path: Path, *, locked: bool, disks_are_mounted: bool) -> AreaEntry:
    owner = read_owner(path)
    made_here = owner is not None and owner.path_is_valid_here
    return AreaEntry(
        path=path,
        owner=owner,
        made_here=made_here,
        locked=locked,
        size_bytes=tree_bytes(path),
        modified_at=path.stat().st_mtime,
        kept_because=_reason_to_keep(
            path, owner, made_here=made_here, locked=locked, disks_are_mounted=disks_are_mounted
        ),
        unsaved=tuple(_unsaved(path)),
    )


def _unsaved(area: Path) -> Iterator[Path]:
    for folder in sorted(area.glob("slot*")):
        slot = StagingSlot(0, folder)
        with suppress(CheckpointError):
            staged = slot.read_snapshot()
            if staged is not None and staged.must_reach_disk and not slot.drained:
                yield path_of(staged)


def _reason_to_keep(
    path: Path, owner: AreaOwner | None, *, made_here: bool, locked: bool, disks_are_mounted: bool
) -> str | None:
    if locked:
        return "its run is alive"
    if owner is None:
        # killed between the creation of the area and its record: no rank can have written into it
        is_new = AREA_NAME.fullmatch(path.name) is not None and set(os.listdir(path)) <= {"lock"}
        return None if is_new else "it does not record which run it belongs to (an earlier release wrote it)"
    if not made_here:
        return "it was made in another container, whose files cannot be seen from here"
    directory = owner.directory
    if not directory.parent.exists() and not disks_are_mounted:
        return (
            f"{directory.parent} is missing, which may be a disk that is not mounted (gc --disks-mounted"
            " frees it)"
        )
    if not os.path.lexists(directory):
        return None
    try:
        return "its run can be resumed from it" if needs_area(directory, path) else None
    except (OSError, ValueError, TypeError):
        return f"{directory / 'run.json'} cannot be read"
