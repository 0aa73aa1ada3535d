"""Rename checkpoints and snapshots since the onset of a collapse, before the next attempt chooses one.

A directory is renamed to `rejected-checkpoint-N` and keeps the reason; nothing is deleted on disk. A snapshot
in memory is discarded. Called by the supervisor while no rank runs, and by `faults.py` to learn whether
anything would be left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.publishing import reject_checkpoint
from grpo_run.runtime.checkpoints.search import (
    FoundCheckpoint,
    directories_of_run,
    find_checkpoints,
    output_directory_of,
)
from grpo_run.runtime.history.events import RolledBack
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import pending_rollback
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler


def can_go_back(history: History, config: RunConfig, call: int, before_step: int) -> bool:
    """Return whether a rollback loses no more than the steps from `before_step` on, as far as they are saved.

    It does if everything that is saved of the call is from the onset or later: the call would begin anew.

    Args:
        call: the number of the `train()` call.
        before_step: checkpoints from this step on would be set aside.
    """
    steps = [found.manifest.step for found in _saved(history, config.run_id, call)]
    if config.snapshot_directory is not None:
        steps += [
            staged.step
            for staged, _ in StagingArea(config.snapshot_directory).snapshots()
            if staged.train_call.ordinal == call
        ]
    return not steps or min(steps) < before_step


def set_aside(history: History, config: RunConfig, drains: DrainScheduler | None, reporter: Reporter) -> bool:
    """Carry out the rollback that was decided last, if it has not been done; return whether anything was set
    aside.

    Args:
        drains: of the snapshots in memory; None if there are none.
    """
    rollback = pending_rollback(history.recoveries)
    if rollback is None or rollback.before_step is None:
        return False
    call, before = rollback.train_call, rollback.before_step
    discarded = drains.discard(call, before) if drains is not None else []
    renamed = []
    kept = [0]
    reason = f"from after the onset: {rollback.sentence}"
    for found in list(_saved(history, config.run_id, call)):
        fence = fencing.recorded(config.run_directory, output_directory_of(found.path))
        if found.manifest.step < before:
            kept.append(found.manifest.step)
        elif (path := reject_checkpoint(found.path, reason, fence=fence)) is not None:
            renamed.append(path)
    if drains is not None:
        kept += [staged.step for staged, _ in drains.staging.snapshots() if staged.train_call.ordinal == call]
    reporter.write(
        RolledBack(
            train_call=call,
            step=max(kept),
            before_step=before,
            snapshots=discarded,
            renamed=[str(path) for path in renamed],
        )
    )
    for path in renamed:
        reporter.notify(
            f"{path.name.removeprefix('rejected-')} is from after the onset; renamed to {path.name}"
        )
    return bool(discarded or renamed)


def _saved(history: History, run_id: str, call: int) -> Iterator[FoundCheckpoint]:
    """The complete checkpoints on disk of one call of the run."""
    directories = [
        Path(one.path) for known in history.calls if known.ordinal == call for one in known.directories
    ]
    for found in find_checkpoints(*directories_of_run(run_id, *directories)):
        if found.manifest.run_id == run_id and found.manifest.train_call.ordinal == call:
            yield found
