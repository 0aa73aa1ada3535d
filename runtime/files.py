"""File helpers for the whole runtime: atomic replacement, appended lines, JSON files, fsync, file locks,
descriptors that are closed with their owner, errnos for a full disk.

Imports nothing of this project. Does not know the run directory or checkpoints; callers pass paths.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
"""Errors of a write that does not fit: disk full, quota reached, file size limit, no memory (tmpfs)."""

SHARED_MEMORY_ROOT = Path("/dev/shm")
"""The tmpfs that shm_overview(7) says every Linux system mounts. Files in it outlive processes, not a reboot.
"""

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Differs after every start of the machine; see random(4)."""

BLOCK_BYTES = 512
"""Unit of st_blocks; see stat(3type)."""

LOCK_POLL_SECONDS = 0.005
"""Time between two attempts to take a lock that another process holds."""


def close_with(owner: object, descriptor: int) -> weakref.finalize[[int], Any]:
    """Close a descriptor when its owner is freed, but not at the exit of a process.

    In a forked process the number may belong to another file by then.

    Returns:
        a function that closes it before, once.
    """
    closing = weakref.finalize(owner, os.close, descriptor)
    closing.atexit = False
    return closing


def write_json(
    path: Path, value: Any, *, indent: int | None = 2, durable: bool = True, through: Path | None = None
) -> None:
    """Replace a file by JSON text, atomically and with mode 0600.

    Readers see the old content or the new content, never a part. The text is ASCII, because command-line
    arguments may contain lone surrogates, which UTF-8 cannot encode.

    Args:
        indent: spaces per level; None writes one line.
        durable: fsync the file before the rename and its directory after it.
        through: the directory of the temporary file, by default that of the file.

    Raises:
        OSError: the file cannot be written; the old content is unchanged and the temporary file is removed.
        TypeError: `value` is not JSON; nothing is written.
    """
    text = json.dumps(value, indent=indent) + "\n"
    replace_file(path, text.encode("ascii"), durable=durable, through=through)


def replace_file(
    path: Path, content: bytes, *, mode: int = 0o600, durable: bool = False, through: Path | None = None
) -> None:
    """Replace a file atomically: readers see the old content or the new content, never a part.

    Args:
        mode: of the new file.
        durable: fsync the file before the rename and its directory after it.
        through: the directory of the temporary file, by default that of the file.

    Raises:
        OSError: the file cannot be written; the old content is unchanged and the temporary file is removed.
    """
    temporary = (through or path.parent) / f".{path.name}.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    if durable:
        sync_directory(path.parent)


def append_lines(path: Path, lines: bytes) -> int:
    """Append whole lines to a file of mode 0600, by one write, and return its size.

    A last line that a full disk or a crash has cut is ended first, so that it costs no other.

    Raises:
        OSError: they cannot be written, or not as a whole.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            lines = b"\n" + lines
        if os.write(descriptor, lines) < len(lines):
            raise OSError(errno.ENOSPC, "the disk is full", str(path))
        return size + len(lines)
    finally:
        os.close(descriptor)


def sync_directory(path: Path) -> None:
    """Fsync a directory, so that renames and new names in it survive a crash of the machine.

    File systems that do not support fsync of a directory are accepted as they are.

    Raises:
        OSError: the disk reports an error.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def sync_tree(path: Path, progress: Callable[[int], None] = lambda size_bytes: None) -> None:
    """Fsync every file and directory under `path`, children before their directory.

    Args:
        progress: called with the size of each file in bytes, once it is on the disk.

    Raises:
        OSError: the disk reports an error.
    """
    for folder, _, names in os.walk(path, topdown=False):
        for name in names:
            # another rank may remove its temporary file meanwhile
            with contextlib.suppress(FileNotFoundError), open(Path(folder) / name, "rb") as file:
                os.fsync(file.fileno())
                progress(os.fstat(file.fileno()).st_size)
        sync_directory(Path(folder))


def tree_bytes(path: Path) -> int:
    """Return the space that a file, or all files in a folder, take. What is removed meanwhile is not counted.

    Symbolic links are not followed.
    """
    files = [path] if not path.is_dir() or path.is_symlink() else _files_in(path)
    total = 0
    for file in files:
        with contextlib.suppress(OSError):
            total += file.lstat().st_blocks * BLOCK_BYTES
    return total


def short_path(path: str | Path) -> str:
    """Return a path as it is shown: relative to the working directory if it is below it."""
    try:
        relative = os.path.relpath(path)
    except (OSError, ValueError):  # the working directory is gone, or the path is empty
        return str(path)
    return str(path) if relative.startswith("..") else relative


def _files_in(folder: Path) -> Iterator[Path]:
    return (Path(parent, name) for parent, _, names in os.walk(folder) for name in names)


def lock_file(descriptor: int, wait_seconds: float = 0.0, *, shared: bool = False) -> bool:
    """Take the flock(2) of an open file. Return False if it is still held at the deadline.

    Args:
        wait_seconds: how long to keep trying; 0 tries once.
        shared: exclude exclusive locks only.

    Raises:
        OSError: the file system has no locks.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOCK_POLL_SECONDS)
        else:
            return True


_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of fcntl(2): type, whence, start, length, pid."""


def show_lock(descriptor: int) -> None:
    """Take a lock that `sees_lock` sees, until the open file is closed. It excludes nobody from `lock_file`.

    Raises:
        OSError: the file system has no such locks.
    """
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))


def sees_lock(descriptor: int) -> bool:
    """Return whether another open file, also of another container or machine, holds the lock of `show_lock`.

    Takes no lock, so nobody waits for who looks. A file that is open for reading suffices.

    Raises:
        OSError: the file system has no such locks.
    """
    wanted = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 0, 0)
    kind: int = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))[0]
    return kind != fcntl.F_UNLCK
