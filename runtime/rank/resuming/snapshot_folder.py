"""Open a snapshot in memory for resuming, and make the directory that stands for its checkpoint.

    <staging area>/loading/checkpoint-N/
      trainer_state.json …   hard links to the files that the trainer wrote itself
      scheduler.pt …         small files of the buffers, written
      optimizer.pt …         empty: large files of the buffers, which `loading.py` serves

`OpenSnapshot` locks, checks and maps the snapshot that the supervisor has named; `memory.py` calls it. Rank
0 makes the folder, and all ranks use it. An empty file cannot be mistaken for its content: whatever reads
it without being served fails.

`MemoryPool` reuses the pages that one file's tensors have released for the next file of one checkpoint: a
trainer drops the weights after copying them and then keeps the optimizer's state, and most of the time of
loading is the kernel's for pages that are used for the first time. Loads nothing itself, and does not
decide whether the ranks use the snapshot.
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import weakref
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from grpo_run.runtime.checkpoints.manifest import Identity, Manifest
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.snapshots.area import LOADING, StagingArea
from grpo_run.runtime.snapshots.buffer import SnapshotBufferReader, aligned
from grpo_run.runtime.snapshots.index import SafetensorsFile, SnapshotIndex, TorchFile
from grpo_run.runtime.snapshots.slot import SnapshotName, StagedSnapshot, StagingSlot
from grpo_run.runtime.snapshots.writer import write_files

MINIMUM_BYTES = 1 << 20
"""Smaller tensors get memory of their own from torch, which has some at hand."""


class MemoryPool:
    """Tensors in one private mapping, and in memory of their own if it has no space. Not for several threads."""

    def __init__(self) -> None:
        self._region: memoryview | None = None
        self._position = 0
        self._taken: list[weakref.ref[memoryview]] = []

    def begin_file(self, size_bytes: int) -> None:
        """Prepare for the tensors of a file: use the region again if all its tensors are gone, or else make a new one.

        Args:
            size_bytes: of the file. The kernel provides memory when it is used.

        Raises:
            OSError: there is no address space.
        """
        if self._region is not None and all(view() is None for view in self._taken):
            self._position = 0
            self._taken.clear()
        elif size_bytes >= MINIMUM_BYTES:
            # a region that still has tensors lives as long as they do
            region = mmap.mmap(-1, aligned(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._region, self._position, self._taken = memoryview(region), 0, []

    def take(self, size_bytes: int) -> torch.Tensor:
        """Return a tensor of bytes with undefined content, which no other tensor refers to."""
        if (
            self._region is None
            or size_bytes < MINIMUM_BYTES
            or self._position + size_bytes > len(self._region)
        ):
            return torch.empty(size_bytes, dtype=torch.uint8)
        # the tensor's storage refers to this object, and nothing else does
        view = self._region[self._position : self._position + size_bytes]
        self._position += aligned(size_bytes)
        self._taken.append(weakref.ref(view))
        return torch.frombuffer(view, dtype=torch.uint8)


SERVED_BYTES = 16 << 10
"""Files from this size on are served from memory. Smaller ones are written, which takes less than a millisecond."""
READ_LATER = "rng_state"
"""Trainer loads the states of the random generators when the first step begins, after everything else. They are files
of this prefix and are always written."""


class ServedFolder:
    """The directory of one rank, and the files that it serves. Holds nothing open.

    Args:
        path: the directory, named like the checkpoint.
        files: the files of the buffers of all ranks, with the mapped buffer that holds each.
        threads: maximum number of threads that copy one tensor.
    """

    def __init__(
        self,
        path: Path,
        files: list[tuple[TorchFile | SafetensorsFile, SnapshotBufferReader]],
        *,
        threads: int,
    ) -> None:
        self.path = path
        self.threads = threads
        self.pool = MemoryPool()
        """Of the tensors that this rank loads."""
        self._files = {str(PurePosixPath(file.path)): (file, buffer) for file, buffer in files}
        self.served = {
            name: one
            for name, one in self._files.items()
            if _size_bytes(one[0]) >= SERVED_BYTES and not name.startswith(READ_LATER)
        }
        """Files that are empty in the directory, by path relative to it."""

    def make(self, plain_files: Path) -> None:
        """Make the directory, in place of what an earlier attempt has left.

        Args:
            plain_files: the directory of the files that are not in a buffer, on the same file system.

        Raises:
            OSError: there is no memory, or a file has disappeared. CheckpointError: a file lies outside its buffer.
        """
        shutil.rmtree(self.path.parent, ignore_errors=True)
        self.path.mkdir(parents=True, mode=0o700)
        for folder, _, names in os.walk(plain_files):
            target = self.path / os.path.relpath(folder, plain_files)
            target.mkdir(exist_ok=True, mode=0o700)
            for name in names:
                os.link(os.path.join(folder, name), target / name)
        for path, (file, buffer) in self._files.items():
            (self.path / path).unlink(missing_ok=True)
            if path in self.served:
                (self.path / path).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                (self.path / path).touch(0o600)
            else:
                write_files(SnapshotIndex(files=[file]), buffer, self.path)

    def write(self, path: str) -> None:
        """Write a served file into the directory, for a reader that cannot be served. Other ranks may do the same."""
        file, buffer = self._files[path]
        if (self.path / path).stat().st_size:
            return
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}")
        try:
            # torch stores the file's own name in the file, so it is the same in the temporary directory
            (written,) = write_files(SnapshotIndex(files=[file]), buffer, temporary)
            os.replace(written, self.path / path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _size_bytes(file: TorchFile | SafetensorsFile) -> int:
    return sum(record.size for record in file.records)


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
