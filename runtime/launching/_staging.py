"""The staging area of a launch: found by `run.json`, renamed, locked, and recorded again.

Called by `launch.py` under the lock of the run directory. Which area is whose is decided in
`runtime.snapshots`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_run.runtime.errors import EXIT_FINISHED
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import CheckpointPublished, RunEnded
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.summary import lacks_model_of_script, model_place, summarize
from grpo_run.runtime.launching._configuration import PreparedLaunch
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.ownership import (
    EARLIER,
    LockedArea,
    describe_owner,
    find_area,
    recorded_areas,
    take_area,
)
from grpo_run.runtime.snapshots.slot import PARTS, STAGED
from grpo_run.watchdog.text import size_text

if TYPE_CHECKING:
    from grpo_run.runtime.snapshots.last_writes import OnlyInMemory


SINCE_WRITTEN = "Since then, what was only in memory has been written to disk."


def _notify(text: str) -> None:
    print(f"grpo-run: {text}", flush=True)


@contextmanager
def staged(
    launch: PreparedLaunch, directory: RunDirectory, history: History, fields: dict[str, Any]
) -> Iterator[PreparedLaunch]:
    """Write `run.json`, and hold the run's staging area during the block.

    Args:
        directory: of the run, locked by the caller.
        history: of the run; contains what is written meanwhile.
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
        write_kept_checkpoints(found, directory, config.run_id, history)
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
            # the run has ended before its first snapshot; a forked process that unwinds the stack removes
            # nothing
            left = [*area.path.glob(f"*/{STAGED}"), *area.path.glob(f"*/{PARTS}")]
            if os.getpid() == supervisor and not left:
                StagingArea(area.path).clear()
            os.close(area.lock)


def find(directory: RunDirectory, run_id: str) -> LockedArea | None:
    """Lock and return the area that the run's earlier supervisors have left, or None."""
    return find_area(recorded_areas(directory.recorded()), describe_owner(run_id, directory.path))


def write_kept_checkpoints(
    area: LockedArea,
    directory: RunDirectory,
    run_id: str,
    history: History,
    *,
    wait_seconds: float = 0.0,
    interrupted: Callable[[], bool] = lambda: False,
) -> OnlyInMemory | None:
    """Write the snapshots of an area to disk, say which, then free and unlock it.

    What cannot be written stays in memory. A run whose script ran to its end, and that lacks nothing any
    more, has finished then; for any other, the sentence of its end goes on, because it may name what was only
    in memory.

    Args:
        history: of the run, which contains what is written afterwards.
        wait_seconds, interrupted: as of `write_last`.

    Returns:
        what is still in memory only.
    """
    from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
    from grpo_run.runtime.snapshots.last_writes import write_last

    journal = Journal(directory.journal, run_id)
    written: list[str] = []

    def write(event: Event) -> None:
        entry = journal.entry(event)
        journal.append(entry)
        history.apply(entry.event)
        if isinstance(event, CheckpointPublished):
            written.append(event.path)
            _notify(f"wrote {event.path} ({size_text(event.size_bytes or 0)}), which was only in memory")

    try:
        drains = DrainScheduler(StagingArea(area.path), write=write, warn=_notify, preloaded=False)
        left = write_last(
            drains, wait_seconds=wait_seconds, interrupted=interrupted, notify=_notify,
            only_model=lacks_model_of_script(history),
        )  # fmt: skip
        drains.close()
    finally:
        os.close(area.lock)
    if left is not None:
        _notify(left.sentence)
        return left
    if history.exit_code is None or history.finished:
        return None
    if history.completed and not history.lost.sentence:
        code = EXIT_FINISHED
        sentence = " ".join(filter(None, (summarize("finished", history, code), model_place(history))))
    elif written:
        code, sentence = history.exit_code, f"{history.sentence} {SINCE_WRITTEN}".lstrip()
    else:
        return None
    write(
        RunEnded(
            exit_code=code,
            sentence=sentence,
            step=history.step,
            completed=history.completed,
            stopped=history.state == "stopped",
        )
    )
    return None
