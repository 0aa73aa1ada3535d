"""Agree on whether the ranks can load the snapshot in memory that the supervisor expects them to load.

All ranks can, or none does: a rank that cannot says why, and all take the newest checkpoint on disk. Called at the
start of each `train()` call; `choice.py` then decides whether the call resumes from it.
"""

from __future__ import annotations

from collections.abc import Container

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.resuming.snapshot_folder import OpenSnapshot
from grpo_run.runtime.rank.saving.copying import copy_threads
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.area import StagingArea


def open_expected(session: Session, begun: Container[int]) -> OpenSnapshot | None:
    """Open the expected snapshot on every rank. Collective if there is one.

    Args:
        begun: numbers of the run's calls that were begun in this attempt. The snapshot of such a call was used.

    Returns:
        None on every rank if the supervisor expects none, or a rank cannot open it; the journal has the reason.
    """
    name, directory = session.settings.expected_snapshot, session.config.snapshot_directory
    if name is None or directory is None or name.train_call in begun:
        return None
    opened = None
    try:
        opened = OpenSnapshot(StagingArea(directory), name, threads=copy_threads(session.local_world_size))
    except CheckpointError as error:
        _report_unusable(session, error)
    if session.votes.maximum(int(opened is None)) and opened is not None:
        opened.close()
        return None
    return opened


def checkpoint_for(
    session: Session, snapshot: OpenSnapshot | None, call: TrainCall
) -> FoundCheckpoint | None:
    """Return the snapshot as a checkpoint that `call` can load, or None. Called on rank 0.

    Raises:
        OSError: there is no memory for the directory to load it from. It ends the attempt, and the supervisor writes
            the snapshot to disk before the next one.
    """
    if snapshot is None:
        return None
    saved = snapshot.staged.train_call
    if (saved.ordinal, saved.trainer_class) != (call.ordinal, call.trainer_class):
        return None
    try:
        snapshot.make_folder()
    except CheckpointError as error:
        _report_unusable(session, error)
        return None
    return snapshot.checkpoint


def _report_unusable(session: Session, error: CheckpointError) -> None:
    text = f"the snapshot in memory cannot be used: {error}"
    session.warn_in_journal(text)
    session.notify(f"{text}; the newest complete checkpoint on disk is used instead")
