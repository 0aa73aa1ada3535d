"""One staging slot: a snapshot in memory, its lock, and the record that declares it complete.

Ranks write a slot (`runtime.rank.saving`); the drain worker, and ranks that resume (`runtime.rank.resuming`), read it at the
same time. Which slot is used is decided in `area.py`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pydantic

from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.checkpoints.digests import FileEntry, digest_file, verify_digests
from grpo_run.runtime.checkpoints.manifest import Identity
from grpo_run.runtime.checkpoints.search import directory_of, name_of
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import lock_exclusively, lock_shared, write_json
from grpo_run.runtime.snapshots.buffer import check_in_memory, free_memory
from grpo_run.runtime.snapshots.index import SnapshotIndex, read_index

STAGED = "STAGED.json"
PREPARED = "STAGED.json.prepared"
"""The content of `STAGED` before the snapshot is complete."""
DRAINED = "DRAINED"
SCHEMA = 1
MAX_RECORDED_BYTES = 64 << 20
"""Total size of the trainer's own files up to which they are digested when a snapshot is complete: some tens of
milliseconds. Usually they are a tokenizer and a few JSON files; FSDP writes its state as such files."""


class StagedSnapshot(Identity):
    """The contents of `STAGED.json`: what a snapshot is, and where its checkpoint belongs.

    A snapshot that is neither `scheduled` nor `urgent` is written to disk only when it is needed for recovery.

    Attributes:
        urgent: it is written to disk like a scheduled one: of a stop, of the last step, or for the user.
        attempt: number of the attempt that took it.
        output_dir: where its checkpoint belongs.
        limit: the script's `save_total_limit`.
        best: directory name of the script's best checkpoint so far.
        staged_at: when it was taken, in seconds since the epoch.
        files: entries of the files that are not in a buffer, by path relative to the checkpoint directory; None if
            they were not recorded, and the snapshot must be written to disk before it is loaded.
    """

    schema_version: int = SCHEMA
    attempt: int
    output_dir: str
    limit: int | None = None
    best: str | None = None
    staged_at: float
    urgent: bool = False
    files: dict[str, FileEntry] | None = None

    @property
    def must_reach_disk(self) -> bool:
        """Whether the snapshot may not be dropped for a newer one before it is on disk."""
        return self.scheduled or self.urgent

    @property
    def loads_by_rank(self) -> bool:
        """Whether each rank loads its part with functions that can be served from memory.

        A loop does, however its state is spread over ranks. Trainers of sharded state load with functions of their own.
        """
        return self.layout == "ddp" or self.train_call.trainer_class == LOOP

    @property
    def order(self) -> tuple[int, int, int, float]:
        """Sort key, newer is greater. The attempt comes first: a later one may repeat steps and calls."""
        return (self.attempt, self.train_call.ordinal, self.step, self.staged_at)


def path_of(staged: StagedSnapshot) -> Path:
    """Return the path of a snapshot's checkpoint on disk."""
    directory = directory_of(staged, Path(staged.output_dir))
    return directory / name_of(directory, staged.step)


class SnapshotName(pydantic.BaseModel):
    """Names one snapshot: its slot, and `StagedSnapshot.order`. The slot may hold another one later."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    slot: int
    order: tuple[int, int, int, float]

    @property
    def train_call(self) -> int:
        """The number of its `train()` call."""
        return self.order[1]


@dataclass(frozen=True)
class StagingSlot:
    """The directory for one snapshot. Methods that change it require the caller to hold its lock."""

    index: int
    path: Path

    @property
    def files(self) -> Path:
        """The directory that stands in for the trainer's `output_dir`."""
        return self.path / "files"

    def buffer_path(self, rank: int) -> Path:
        """Return the file of one rank's snapshot buffer."""
        return self.path / f"rank{rank}.arena"

    def index_path(self, rank: int) -> Path:
        """Return the file of one rank's snapshot index."""
        return self.path / f"rank{rank}.json"

    def read_snapshot(self) -> StagedSnapshot | None:
        """Return the complete snapshot in this slot, or None.

        Raises:
            CheckpointError: `STAGED.json` is not valid.
        """
        try:
            raw = (self.path / STAGED).read_bytes()
        except OSError:
            return None
        try:
            staged = StagedSnapshot.model_validate_json(raw)
        except pydantic.ValidationError as error:
            raise CheckpointError(f"{self.path / STAGED}: {error.errors()[0]['msg']}") from error
        if staged.schema_version != SCHEMA:
            raise CheckpointError(f"{self.path / STAGED} has schema {staged.schema_version}, not {SCHEMA}")
        return staged

    def check_complete(self, staged: StagedSnapshot) -> list[SnapshotIndex]:
        """Check that everything the snapshot needs is in memory, and return the index of each rank.

        The bytes in the buffers are not read: memory is trusted as the memory of a process is. The other files are
        compared with their digests, if these were recorded.

        Raises:
            CheckpointError: an index, a buffer or another file is missing, damaged or too short.
        """
        indexes = [read_index(self.index_path(rank)) for rank in range(staged.world_size)]
        for rank, index in enumerate(indexes):
            ends = [record.offset + record.size for file in index.files for record in file.records]
            if ends:
                check_in_memory(self.buffer_path(rank), max(ends))
        verify_digests(self.files / staged.folder, staged.files or {})
        return indexes

    def checkpoint_bytes(self, staged: StagedSnapshot) -> int:
        """Return how large the checkpoint of the snapshot in this slot is on disk.

        Raises:
            CheckpointError: an index or another file cannot be read.
        """
        folder = self.files / staged.folder
        indexes = [read_index(self.index_path(rank)) for rank in range(staged.world_size)]
        try:
            files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            folder.stat()
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
        return files + sum(index.size_bytes for index in indexes)

    @property
    def drained(self) -> bool:
        """The snapshot is on disk as a checkpoint."""
        return (self.path / DRAINED).exists()

    def mark_drained(self) -> None:
        """Record that the snapshot is on disk."""
        (self.path / DRAINED).touch(0o600)

    def begin_snapshot(self) -> None:
        """Discard the present snapshot before another one is written."""
        (self.path / STAGED).unlink(missing_ok=True)
        (self.path / PREPARED).unlink(missing_ok=True)
        (self.path / DRAINED).unlink(missing_ok=True)
        shutil.rmtree(self.files, ignore_errors=True)
        self.files.mkdir(mode=0o700)

    def prepare_snapshot(self, staged: StagedSnapshot) -> None:
        """Write what `complete_snapshot` declares, while there is memory for it."""
        write_json(self.path / PREPARED, staged.model_dump())

    def record_files(self, staged: StagedSnapshot) -> StagedSnapshot:
        """Add the digests of the files that are not in a buffer to the prepared snapshot, and return it.

        Without memory for that, or with larger files than are digested here, it stays as it is.
        """
        folder = self.files / staged.folder
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        try:
            if sum(path.stat().st_size for path in paths) > MAX_RECORDED_BYTES:
                return staged
            files = {str(path.relative_to(folder)): digest_file(path) for path in paths}
            recorded = staged.model_copy(update={"files": files})
            if not (self.path / PREPARED).exists():
                return staged  # the slot was removed, and must not become complete without its files
            self.prepare_snapshot(recorded)
        except OSError:
            return staged
        return recorded

    def complete_snapshot(self) -> None:
        """Declare the prepared snapshot complete, after all ranks have written. Takes no memory."""
        os.replace(self.path / PREPARED, self.path / STAGED)

    def free(self) -> int:
        """Discard the present snapshot, and free the memory of its buffers; return how many bytes that were.

        Raises:
            CheckpointError, OSError: a buffer cannot be freed; the snapshot is discarded.
        """
        before = self.size_bytes()
        self.begin_snapshot()
        for buffer in self.path.glob("rank*.arena"):
            free_memory(buffer)
        return max(0, before - self.size_bytes())

    @contextmanager
    def locked(self, wait_seconds: float = 0.0, *, shared: bool = False) -> Iterator[bool]:
        """Hold the slot's lock in the block.

        Args:
            shared: only to read the slot, beside other readers.

        Yields:
            True, or False if another process still holds the lock after `wait_seconds`.
        """
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        acquired = False
        try:
            acquired = (lock_shared if shared else lock_exclusively)(descriptor, wait_seconds)
            yield acquired
        finally:
            if acquired:
                # closing is not enough: a child forked meanwhile shares the lock
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    @property
    def busy(self) -> bool:
        """The slot is being written, drained or loaded now."""
        with self.locked() as acquired:
            return not acquired

    def size_bytes(self) -> int:
        """Return the memory that the slot's files use."""
        return sum(file.stat().st_blocks * 512 for file in self.path.rglob("*") if file.is_file())
