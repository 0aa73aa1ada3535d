"""Delete the directory of a run that is not live, or a checkpoint; find the staging areas that runs name.

`remove_run`, for `rm.py` and `gc.py`, also deletes the memory that only this run needs. `remove_folder` is
for `checkpoints.py` and `gc.py`. `areas_of` lists the user's staging areas on every file system in memory
that a run names, for `ls.py` and `gc.py`. What may be deleted is decided in `runtime/leftovers.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from grpo_run.runtime.catalog import links_of
from grpo_run.runtime.checkpoints.manifest import remove_manifest
from grpo_run.runtime.checkpoints.publishing import PARTIAL, clean_partial_directories
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.registry import forget, registry_folder, targets_folder, withdraw_target
from grpo_run.runtime.snapshots.leftovers import AreaEntry, list_areas, remove_area
from grpo_run.runtime.snapshots.ownership import recorded_areas


def remove_run(directory: RunDirectory) -> list[Path]:
    """Delete what grpo-run has written into a run directory, and the directory if nothing else is in it.

    Returns:
        what else is in it, and stays.

    Raises:
        RunDirectoryError: the run is live, or something cannot be deleted.
    """
    known = directory.run_json.is_file()
    areas = recorded_areas(directory.read_run()) if known else []
    links = links_of(directory, RunReader(directory).read()) if known else []
    try:
        with directory.locked():
            for one in links:
                if one.path.is_dir():
                    shutil.rmtree(one.path)
            # run.json last: until then the run is found, and can be removed again
            for path in sorted(directory.own_files(), key=lambda path: path == directory.run_json):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
            rest = sorted(directory.path.iterdir())
            if not rest:
                directory.path.rmdir()
    except OSError as error:
        raise RunDirectoryError(f"{error.filename} cannot be deleted: {error.strerror}") from error
    forget(directory.path, registry_folder())
    withdraw_target(directory.path, targets_folder())
    for area in areas:
        remove_area(area)
    return rest


def remove_folder(path: Path) -> str | None:
    """Delete a checkpoint, or a folder of links to checkpoints. Returns why it is still there, or None."""
    try:
        if PARTIAL.fullmatch(path.name):
            clean_partial_directories(path.parent)
            return "a process is writing it" if path.exists() else None
        remove_manifest(path)  # first, so that an interrupted deletion leaves no checkpoint
        shutil.rmtree(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return None


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
