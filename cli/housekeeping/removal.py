"""Delete the directory of a run that is not live, and the memory that only it needs. Called by `rm.py` and `gc.py`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from grpo_run.runtime.catalog.registry import forget, registry_folder
from grpo_run.runtime.catalog.runs import links_of
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import read_status
from grpo_run.runtime.staging.ownership.leftovers import remove_area
from grpo_run.runtime.staging.ownership.owner import recorded_areas


def remove_run(directory: RunDirectory) -> list[Path]:
    """Delete what grpo-run has written into a run directory, and the directory if nothing else is in it.

    Returns:
        what else is in it, and stays.

    Raises:
        RunDirectoryError: the run is live, or something cannot be deleted.
    """
    known = directory.run_json.is_file()
    areas = recorded_areas(directory.read_run()) if known else []
    links = links_of(directory, read_status(directory)) if known else []
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
    for area in areas:
        remove_area(area)
    return rest
