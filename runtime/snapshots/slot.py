"""One staging slot: a snapshot in memory, its lock, and the record that declares it complete.

Ranks write a slot (`runtime.rank.saving`); the drain worker, and ranks that resume (`runtime.rank.resuming`),
read it, also at the same time. Which slot is used is decided in `area.py`.
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

from grpo_run.runtime.checkpoints.completeness import TRAINER_STATE
from grpo_run.runtime.checkpoints.manifest import Identity
from grpo_run.runtime.checkpoints.search import directory_of, name_of
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import lock_file, tree_bytes, write_json

STAGED = "STAGED.json"
PREPARED = "STAGED.json.prepared"
"""The content of `STAGED` before the snapshot is complete."""
PARTS = "PARTS.json"
"""What a slot has of a snapshot of several hosts; see `parts.py`."""
DRAINED = "DRAINED"
LOADED = "LOADED"
SPARE_SUFFIXES = frozenset({".pt", ".pth", ".bin", ".safetensors"})
"""Of files that are kept for the next snapshot. Others, such as FSDP's, are never written over."""
SCHEMA = 2
COMPACT = "\n"
"""Before a trainer's state without line breaks; the drain worker writes it to disk with them."""


class StagedSnapshot(Identity):
    """The contents of `STAGED.json`: what a snapshot is, and where its checkpoint belongs.

    A snapshot that is neither `scheduled` nor `urgent` is written to disk only when it is needed for
    recovery.

    Attributes:
        urgent: it is written to disk like a scheduled one: of a stop, of the last step, or for the user.
        attempt: number of the attempt that took it.
        output_dir: where its checkpoint belongs.
        limit: the script's `save_total_limit`.
        best: directory name of the script's best checkpoint so far.
        staged_at: when it was taken, in seconds since the epoch.
        files: size of each file in bytes, by path relative to the checkpoint directory; None if there was
            no memory to record them, and the snapshot must be written to disk before it is loaded.
    """

    schema_version: int = SCHEMA
    attempt: int
    output_dir: str
    limit: int | None = None
    best: str | None = None
    staged_at: float
    urgent: bool = False
    files: dict[str, int] | None = None

    @property
    def must_reach_disk(self) -> bool:
        """Whether the snapshot may not be dropped for a newer one before it is on disk."""
        return self.scheduled or self.urgent

    @property
    def order(self) -> tuple[int, int, int, float]:
        """Sort key, newer is greater. The attempt comes first: a later one may repeat steps and calls."""
        return (self.attempt, self.train_call.ordinal, self.step, self.staged_at)


def path_of(staged: StagedSnapshot) -> Path:
    """Return the path of a snapshot's checkpoint on disk."""
    directory = directory_of(staged, Path(staged.output_dir))
    return directory / name_of(directory, staged.step)


class BrokenSnapshotError(CheckpointError):
    """A snapshot in memory cannot be read."""


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

    @property
    def spare(self) -> Path:
        """Files of an earlier snapshot; the next one is written over those of the same names."""
        return self.path / "spare"

    def read_snapshot(self) -> StagedSnapshot | None:
        """Return the complete snapshot in this slot, or None.

        Raises:
            BrokenSnapshotError: `STAGED.json` is not valid.
        """
        try:
            raw = (self.path / STAGED).read_bytes()
        except OSError:
            return None
        try:
            staged = StagedSnapshot.model_validate_json(raw)
        except pydantic.ValidationError as error:
            raise BrokenSnapshotError(f"{self.path / STAGED}: {error.errors()[0]['msg']}") from error
        if staged.schema_version != SCHEMA:
            raise BrokenSnapshotError(
                f"{self.path / STAGED} has schema {staged.schema_version}, not {SCHEMA}"
            )
        return staged

    def check_complete(self, staged: StagedSnapshot) -> None:
        """Check that every recorded file is in memory with its size.

        Files are not read: memory is trusted as the memory of a process is.

        Raises:
            BrokenSnapshotError: a file is missing, or shorter or longer.
        """
        folder = self.files / staged.folder
        try:
            folder.stat()
            expected = {folder / name: size_bytes for name, size_bytes in (staged.files or {}).items()}
            for path, size_bytes in expected.items():
                if (found_bytes := path.stat().st_size) != size_bytes:
                    raise BrokenSnapshotError(f"{path} has {found_bytes} bytes instead of {size_bytes}")
        except OSError as error:
            raise BrokenSnapshotError(f"{error.filename} cannot be read: {error.strerror}") from error

    def checkpoint_bytes(self, staged: StagedSnapshot) -> int:
        """Return about how large the checkpoint of the snapshot in this slot is on disk."""
        files = sizes(self.files / staged.folder)
        return sum(files.values()) + files.get(TRAINER_STATE, 0)  # for its line breaks

    @property
    def loaded(self) -> bool:
        """Ranks have begun to load the snapshot."""
        return (self.path / LOADED).exists()

    @property
    def drained(self) -> bool:
        """The snapshot is on disk as a checkpoint."""
        return (self.path / DRAINED).exists()

    def mark_drained(self) -> None:
        """Record that the snapshot is on disk."""
        (self.path / DRAINED).touch(0o600)

    def mark_loaded(self) -> None:
        """Record that ranks load this snapshot. They may keep its files mapped, so nothing is written over
        them."""
        (self.path / LOADED).touch(0o600)

    def begin_snapshot(self) -> None:
        """Discard the present snapshot before another one is written, and keep its files as spare ones."""
        (self.path / PARTS).unlink(missing_ok=True)
        (self.path / STAGED).unlink(missing_ok=True)
        (self.path / PREPARED).unlink(missing_ok=True)
        (self.path / DRAINED).unlink(missing_ok=True)
        if not self.loaded:
            for folder in self.files.glob("*"):
                shutil.rmtree(self.spare, ignore_errors=True)
                folder.rename(self.spare)
                for path in self.spare.rglob("*"):
                    if path.suffix not in SPARE_SUFFIXES and not path.is_dir():
                        path.unlink()
        shutil.rmtree(self.files, ignore_errors=True)
        (self.path / LOADED).unlink(missing_ok=True)
        self.files.mkdir(mode=0o700)

    def prepare_snapshot(self, staged: StagedSnapshot) -> None:
        """Write what `complete_snapshot` declares, while there is memory for it."""
        write_json(self.path / PREPARED, staged.model_dump())

    def record_files(self, staged: StagedSnapshot) -> StagedSnapshot:
        """Add the sizes of all files to the prepared snapshot, and return it; without memory it stays as it
        is."""
        if not (self.path / PREPARED).exists():
            return staged  # the slot was removed, and must not become complete without its files
        recorded = staged.model_copy(update={"files": sizes(self.files / staged.folder)})
        try:
            self.prepare_snapshot(recorded)
        except OSError:
            return staged
        return recorded

    def complete_snapshot(self) -> None:
        """Declare the prepared snapshot complete, after all ranks have written. Takes no memory."""
        os.replace(self.path / PREPARED, self.path / STAGED)
        self.discard_spare()  # nothing of the snapshot has these names

    def discard_spare(self) -> None:
        """Free the files of the snapshot before that were not written over."""
        shutil.rmtree(self.spare, ignore_errors=True)

    def free(self) -> int:
        """Discard the present snapshot and free its memory; return how many bytes that were."""
        before = self.size_bytes()
        self.begin_snapshot()
        self.discard_spare()
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
            acquired = lock_file(descriptor, wait_seconds, shared=shared)
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
        return tree_bytes(self.path)


def sizes(folder: Path) -> dict[str, int]:
    """Return the size of each file below a folder, by its relative path."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
