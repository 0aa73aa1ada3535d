"""Open a snapshot in memory for one rank that resumes from it: lock, check, and map it.

Called by `resuming/memory.py` with the snapshot that the supervisor has named. Loads nothing itself
(`interception.py`), and does not decide whether the ranks use it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from grpo_run.runtime.checkpoints.manifest import Identity, Manifest
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.staging.area import LOADING, StagingArea
from grpo_run.runtime.staging.buffer_reader import SnapshotBufferReader
from grpo_run.runtime.staging.index import SafetensorsFile, TorchFile
from grpo_run.runtime.staging.slot import SnapshotName, StagedSnapshot, StagingSlot
from grpo_run.trainers.loading.folder import ServedFolder

LOCK_WAIT_SECONDS = 10.0
"""No rank writes a slot while ranks resume, so the lock is free, except for a moment in which its state is read."""


class OpenSnapshot:
    """A complete snapshot that this rank may load. It is not overwritten until `close`.

    Args:
        staging: the run's staging area.
        name: the snapshot that is expected.
        threads: maximum number of threads that copy one tensor.

    Raises:
        CheckpointError: the slot is being written, holds another snapshot, or is not complete.
    """

    def __init__(self, staging: StagingArea, name: SnapshotName, *, threads: int) -> None:
        self.slot: StagingSlot = staging.slots[name.slot]
        self._stack = ExitStack()
        with ExitStack() as opening:
            try:
                if not opening.enter_context(self.slot.locked(LOCK_WAIT_SECONDS, shared=True)):
                    raise CheckpointError(f"{self.slot.path} is being written")
                staged = self.slot.read_snapshot()
                if staged is None or staged.order != name.order:
                    raise CheckpointError(f"{self.slot.path} no longer holds the snapshot")
                files = self._open_files(opening, staged)
            except OSError as error:
                raise CheckpointError(f"{self.slot.path} cannot be read: {error.strerror}") from error
            self._stack = opening.pop_all()
        self.staged: StagedSnapshot = staged
        self.folder = ServedFolder(staging.path / LOADING / staged.folder, files, threads=threads)

    def _open_files(
        self, opening: ExitStack, staged: StagedSnapshot
    ) -> list[tuple[TorchFile | SafetensorsFile, SnapshotBufferReader]]:
        files: list[tuple[TorchFile | SafetensorsFile, SnapshotBufferReader]] = []
        for rank, index in enumerate(self.slot.check_complete(staged)):
            if index.files:
                buffer = opening.enter_context(SnapshotBufferReader(self.slot.buffer_path(rank)))
                files += [(file, buffer) for file in index.files]
        return files

    def make_folder(self) -> None:
        """Make the directory that the trainer loads from. Called on one rank.

        Raises:
            OSError: there is no memory for it. CheckpointError: a file lies outside its buffer.
        """
        self.folder.make(self.slot.files / self.staged.folder)

    @property
    def checkpoint(self) -> FoundCheckpoint:
        """The checkpoint in memory, as if it had been found on disk. Its manifest names no files."""
        fields: dict[str, Any] = dict(self.staged)
        identity = {name: fields[name] for name in Identity.model_fields}
        return FoundCheckpoint(path=self.folder.path, manifest=Manifest(files={}, **identity))

    def close(self) -> None:
        """Unmap the buffers and release the slot."""
        self._stack.close()
