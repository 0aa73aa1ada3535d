"""Delete the directory of a run that is not live, and find the staging areas that runs name.

`remove_run` also deletes the memory that only this run needs; `rm.py` and `gc.py` call it. `areas_of` lists
the user's staging areas on every file system in memory that a run names, for `ls.py` and `gc.py`. What may
be deleted is decided in `runtime/leftovers.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from grpo_run.runtime.catalog import links_of
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
    lock = directory.acquire()
    try:
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
    finally:
        os.close(lock)
    forget(directory.path, registry_folder())
    withdraw_target(directory.path, targets_folder())
    for area in areas:
        remove_area(area)
    return rest


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
