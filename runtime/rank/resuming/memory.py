"""Resume from a snapshot in memory: open it on every rank, and load it as a checkpoint.

All ranks can open the snapshot that the supervisor expects them to load, or none does: a rank that cannot
says why, and all take the newest checkpoint on disk. The trainer's own code loads it, as from disk: the
slot has the files of a checkpoint. Called at the start of each `train()` call; `choice.py` then decides
whether the call resumes from it.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import ExitStack
from typing import Any

from grpo_run.runtime.checkpoints.manifest import Identity, Manifest, TrainCall
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import SnapshotName, StagedSnapshot, StagingSlot

LOCK_WAIT_SECONDS = 10.0
"""No rank writes a slot while ranks resume, so the lock is free, except for a moment in which its state is
read."""


class OpenSnapshot:
    """A complete snapshot that this rank may load. It is not overwritten until `close`.

    Args:
        staging: the run's staging area.
        name: the snapshot that is expected.

    Raises:
        CheckpointError: the slot is being written, holds another snapshot, or is not complete.
    """

    def __init__(self, staging: StagingArea, name: SnapshotName) -> None:
        self.slot: StagingSlot = staging.slots[name.slot]
        self._lock = ExitStack()
        with ExitStack() as opening:
            try:
                if not opening.enter_context(self.slot.locked(LOCK_WAIT_SECONDS, shared=True)):
                    raise CheckpointError(f"{self.slot.path} is being written")
                staged = self.slot.read_snapshot()
                if staged is None or staged.order != name.order:
                    raise CheckpointError(f"{self.slot.path} no longer holds the snapshot")
                self.slot.check_complete(staged)
                self.slot.mark_loaded()
            except OSError as error:
                raise CheckpointError(f"{self.slot.path} cannot be read: {error.strerror}") from error
            self._lock = opening.pop_all()
        self.staged: StagedSnapshot = staged

    @property
    def checkpoint(self) -> FoundCheckpoint:
        """The checkpoint in memory, as if it had been found on disk. Its manifest names no files."""
        fields: dict[str, Any] = dict(self.staged)
        identity = {name: fields[name] for name in Identity.model_fields}
        path = self.slot.files / self.staged.folder
        return FoundCheckpoint(path=path, manifest=Manifest(files={}, **identity))

    def close(self) -> None:
        """Release the slot."""
        self._lock.close()


def open_expected(session: Session, name: SnapshotName | None, begun: Container[int]) -> OpenSnapshot | None:
    """Open the expected snapshot on every rank. Collective if there is one.

    Args:
        name: of the snapshot; equal on every rank.
        begun: numbers of the run's calls that were begun in this attempt. The snapshot of such a call was
            used.

    Returns:
        None on every rank if none is expected, or a rank cannot open it; the journal has the
        reason.
    """
    directory = session.config.snapshot_directory
    if name is None or directory is None or name.train_call in begun:
        return None
    opened = None
    try:
        opened = OpenSnapshot(StagingArea(directory), name)
    except CheckpointError as error:
        text = f"the snapshot in memory cannot be used: {error}"
        session.warn_in_journal(text)
        session.notify(f"{text}; the newest complete checkpoint on disk is used instead")
    if session.votes.maximum(int(opened is None)) and opened is not None:
        opened.close()
        return None
    return opened


def checkpoint_for(snapshot: OpenSnapshot | None, call: TrainCall) -> FoundCheckpoint | None:
    """Return the snapshot as a checkpoint that `call` can load, or None."""
    if snapshot is None:
        return None
    saved = snapshot.staged.train_call
    if (saved.ordinal, saved.trainer_class) != (call.ordinal, call.trainer_class):
        return None
    return snapshot.checkpoint
