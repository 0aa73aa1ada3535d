"""The directory that stands for a checkpoint in memory while a trainer loads it.

    <staging area>/loading/checkpoint-N/
      trainer_state.json …   hard links to the files that the trainer wrote itself
      scheduler.pt …         small files of the buffers, written
      optimizer.pt …         empty: large files of the buffers, which `interception.py` serves

An empty file cannot be mistaken for its content: whatever reads it without being served fails. Made by rank 0 and
used by all ranks. Does not check the snapshot (`snapshot.py`).
"""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path, PurePosixPath

from grpo_run.runtime.staging.buffer_reader import SnapshotBufferReader
from grpo_run.runtime.staging.index import SafetensorsFile, SnapshotIndex, TorchFile
from grpo_run.runtime.staging.writer import write_files
from grpo_run.trainers.loading.memory_pool import MemoryPool

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
