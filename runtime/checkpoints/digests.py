"""Sizes and BLAKE3 digests of a checkpoint's files: compute and compare them.

Called when a manifest is written and when a checkpoint is verified. Does not read or write manifests.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path

import pydantic
from blake3 import blake3

from grpo_run.runtime.errors import CheckpointError

READ_BYTES = 32 << 20
"""Bytes per read: enough work for every BLAKE3 thread, and rarely more than one second on a slow disk."""


class FileEntry(pydantic.BaseModel):
    """Size in bytes and hexadecimal BLAKE3 digest of one file."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
    size: int
    blake3: str


def digest_file(path: Path, progress: Callable[[int], None] = lambda size_bytes: None) -> FileEntry:
    """Return the size and the digest of one file.

    Args:
        progress: called after each read with the number of bytes just digested.

    Raises:
        OSError: the file cannot be read.
    """
    hasher = blake3(max_threads=blake3.AUTO)
    size = 0
    buffer = memoryview(bytearray(min(READ_BYTES, max(1, path.stat().st_size))))
    # read instead of mmap: a disk error raises OSError instead of SIGBUS
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(buffer[:count])
            size += count
            progress(count)
    return FileEntry(size=size, blake3=hasher.hexdigest())


def verify_digests(path: Path, files: Mapping[str, FileEntry]) -> None:
    """Compare every file under `path` with its recorded size, then with its recorded digest.

    Args:
        files: entries by path relative to `path`, as in `Manifest.files`.

    Raises:
        CheckpointError: names the first file that is missing or differs. Its `__cause__` is the OSError if
            the file could not be read, see `is_read_error`.
    """
    verify_sizes(path, files)
    for name, entry in files.items():
        try:
            found = digest_file(path / name)
        except OSError as error:
            raise CheckpointError(f"{path / name} cannot be read: {error.strerror}") from error
        if found.blake3 != entry.blake3:
            raise CheckpointError(f"{path / name} does not match its digest")


def verify_sizes(path: Path, files: Mapping[str, FileEntry]) -> None:
    """Compare file sizes only, without reading any file. Raises as `verify_digests`."""
    for name, entry in files.items():
        file = path / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{file} is missing: {error.strerror}") from error
        if size != entry.size:
            raise CheckpointError(f"{file} has {size} bytes, the manifest says {entry.size}")


def is_read_error(error: CheckpointError) -> bool:
    """Return True if verification failed on an unreadable file, not on a missing or different one."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)
