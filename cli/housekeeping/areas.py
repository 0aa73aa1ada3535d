"""The staging areas of this user on every file system in memory that a run names. Called by `ls.py` and `gc.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.staging.ownership.leftovers import AreaEntry, list_areas
from grpo_run.runtime.staging.ownership.owner import recorded_areas


def areas_of(runs: Iterable[Path], *, disks_are_mounted: bool = False) -> list[AreaEntry]:
    """Return the staging areas in /dev/shm and in every `--snapshot-dir` of these runs.

    Args:
        runs: run directories.
        disks_are_mounted: the user says that a missing folder was deleted, and is not on an unmounted disk.
    """
    roots = {SHARED_MEMORY_ROOT}
    for path in runs:
        try:
            roots |= {area.parent.parent for area in recorded_areas(RunDirectory(path=path).read_run())}
        except RunDirectoryError:
            continue  # listed as unreadable
    return [
        entry for root in sorted(roots) for entry in list_areas(root, disks_are_mounted=disks_are_mounted)
    ]
