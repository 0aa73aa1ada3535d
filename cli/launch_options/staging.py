"""The staging area of a launch: found by `run.json`, renamed, locked, and recorded again.

Called by `launch.py` under the lock of the run directory. Which area is whose is decided in
`runtime.staging.ownership`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_run.cli.launch_options.parse import LaunchCommand
from grpo_run.runtime.record.journal import Journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.runtime.staging.ownership.acquisition import LockedArea, find_area, take_area
from grpo_run.runtime.staging.ownership.owner import EARLIER, describe_owner, recorded_areas
from grpo_run.runtime.staging.slot import STAGED


def _notify(text: str) -> None:
    print(f"grpo-run: {text}", flush=True)


@contextmanager
def staged(launch: LaunchCommand, directory: RunDirectory, fields: dict[str, Any]) -> Iterator[LaunchCommand]:
    """Write `run.json`, and hold the run's staging area during the block.

    Args:
        directory: of the run, locked by the caller.
        fields: of `run.json`, beside the configuration.

    Yields:
        the launch with the staging area in its configuration; None there if it has none.

    Raises:
        RunDirectoryError: `run.json` cannot be written.
    """
    folder, config, supervisor = launch.snapshot_folder, launch.config, os.getpid()
    found = find(directory, config.run_id)
    earlier: Path | None = None
    if found is not None and found.path.parent != folder:
        # another --snapshot-dir than before: a file cannot be renamed across file systems
        write_kept_checkpoints(found, directory, config.run_id, _notify)
        earlier = found.path if found.path.exists() else None
        found = None

    def record(path: Path | None, before: Path | None) -> None:
        nonlocal config
        config = dataclasses.replace(config, snapshot_directory=path)
        before = before or earlier
        directory.write_run({**config.as_json(), EARLIER: str(before) if before else None, **fields})

    area: LockedArea | None = None
    if folder is not None:
        try:
            area = take_area(folder, found, describe_owner(config.run_id, directory.path), record)
        except OSError as error:
            if found is not None:
                os.close(found.lock)
            _notify(
                f"snapshots cannot be kept in {folder} ({error.strerror}): checkpoints are written directly"
            )
    if area is None:
        record(None, found.path if found is not None else None)
    try:
        yield dataclasses.replace(launch, config=config)
    finally:
        if area is not None:
            # the run has ended before its first snapshot; a forked process that unwinds the stack removes nothing
            if os.getpid() == supervisor and not any(area.path.glob(f"*/{STAGED}")):
                StagingArea(area.path).clear()
            os.close(area.lock)


def find(directory: RunDirectory, run_id: str) -> LockedArea | None:
    """Lock and return the area that the run's earlier supervisors have left, or None."""
    if not directory.run_json.is_file():
        return None
    return find_area(recorded_areas(directory.read_run()), describe_owner(run_id, directory.path))


def write_kept_checkpoints(
    area: LockedArea, directory: RunDirectory, run_id: str, notify: Callable[[str], None] = _notify
) -> None:
    """Write the snapshots of an area to disk, then free and unlock it. What cannot be written stays in memory."""
    from grpo_run.runtime.staging.draining.drain_scheduler import DrainScheduler

    try:
        drains = DrainScheduler(
            StagingArea(area.path),
            write=Journal(directory.journal, run_id).write,
            warn=notify,
            preloaded=False,
        )
        drains.flush(restore=False)
        drains.close()
    finally:
        os.close(area.lock)
