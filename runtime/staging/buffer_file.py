"""The file of a snapshot buffer, apart from its contents: opening it, checking that it was written, and freeing its memory.

Used by both sides of a buffer (`buffer.py`, `buffer_reader.py`) and by slots (`slot.py`). Maps nothing for longer than a call.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path

from grpo_run.runtime.errors import CheckpointError


def free_memory(path: Path) -> None:
    """Free the memory of a buffer, also while ranks have it mapped: its size stays, and its bytes become undefined.

    A rank notices at `SnapshotBuffer.begin`, and takes memory again as for a new buffer.

    Raises:
        CheckpointError: it cannot be opened.
        OSError: the file system cannot free parts of files.
    """
    descriptor = open_own(path, os.O_RDWR)
    try:
        size_bytes = os.fstat(descriptor).st_size
        if size_bytes:
            with mmap.mmap(descriptor, size_bytes) as mapped:
                mapped.madvise(mmap.MADV_REMOVE)
    finally:
        os.close(descriptor)


def check_in_memory(path: Path, size_bytes: int) -> None:
    """Check that the first `size_bytes` of a buffer exist and were written, without reading them.

    Raises:
        CheckpointError: the file is missing, too short, not of this user, or has a hole in that range.
    """
    descriptor = open_own(path, os.O_RDONLY)
    try:
        held = os.fstat(descriptor).st_size
        if held < size_bytes:
            raise CheckpointError(f"{path} has {held} bytes, but its index needs {size_bytes}")
        hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
        if hole < size_bytes:
            raise CheckpointError(
                f"{path} has no data at byte {hole}, but its index needs {size_bytes} bytes"
            )
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)


def open_own(path: Path, flags: int) -> int:
    """Open a regular file of this user. Checked because folders like /dev/shm are world-writable."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a regular file of this user")
    return descriptor
