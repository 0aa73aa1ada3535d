"""One rank's memory for checkpoints: a file in memory that is mapped once, faulted in once and used again.

The rank appends (`Arena`); the process that writes the files to disk reads (`ArenaReader`). Who may do so when is
agreed elsewhere: an arena knows nothing of slots and locks, nor what its bytes mean. Not for two writers at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from grpo_run.runtime.errors import CheckpointError, NoRoomError
from grpo_run.runtime.staging import headroom as limits

ALIGNMENT_BYTES = 64
"""A cache line, and torch's own alignment of storages in files: no copy begins by splitting a line, and no
two records share one. A page would waste 4 KiB for each of an optimizer's many scalars and gain nothing."""
GROWTH_BYTES = 4 << 20
"""The file grows in whole multiples of it: two huge pages, and few calls for the many small records."""
RESERVATION_BYTES = 64 << 20
"""Asked of the kernel at a time: a signal makes it start its call again, and Python's mmap keeps other threads from
running while it faults pages in, so no call may take long."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), Linux 5.14: fault pages in for writing; mmap has no name for it yet."""
DONT_DUMP = 16
"""MADV_DONTDUMP: weights have no place in a core file."""


def aligned(size_bytes: int) -> int:
    """What a record of `size_bytes` takes in an arena."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Arena:
    """The writing side. An existing file of ours is taken over with its memory and its contents.

    The address space for all that the limits could ever allow is mapped at once; memory is taken by `reserve`
    alone, so that nothing is ever mapped again and a view stays valid for the arena's life.
    """

    def __init__(self, path: Path, *, room: Callable[[Path], limits.Room] = limits.tightest) -> None:
        """Open or create the file (0600).

        Args:
            path: a file in a folder that exists, on a file system in memory.
            room: what limits growth; asked at every growth.

        Raises:
            CheckpointError: the path is something else than a file of this user, or cannot be opened.
            NoRoomError: not even the address space can be had.
        """
        self.path = path
        self._room = room
        self._position = 0
        self._descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            os.fchmod(self._descriptor, 0o600)
            status = os.fstat(self._descriptor)
            self._held = _held_bytes(self._descriptor, status)
            capacity = max(self._held, _capacity(path.parent))
            # mmap refuses to reach beyond the end of a file, the kernel does not mind
            os.ftruncate(self._descriptor, capacity)
            try:
                self._map = mmap.mmap(self._descriptor, capacity, access=mmap.ACCESS_WRITE)
            finally:
                os.ftruncate(self._descriptor, self._held)
            with contextlib.suppress(OSError):
                self._map.madvise(DONT_DUMP)
            for start in range(0, self._held, RESERVATION_BYTES):
                self._populate(start, min(RESERVATION_BYTES, self._held - start))
        except OSError as error:
            os.close(self._descriptor)
            kind = NoRoomError if error.errno in limits.NO_ROOM else CheckpointError
            raise kind(f"{path} cannot be mapped: {error.strerror}") from error
        self._view = memoryview(self._map)

    @property
    def held_bytes(self) -> int:
        """Memory that the file holds, in use or not."""
        return self._held

    @property
    def used_bytes(self) -> int:
        """Bytes appended since `begin`, with what alignment took."""
        return self._position

    def begin(self) -> None:
        """Start over: what was appended before may be written over. Keeps the memory."""
        self._position = 0

    def reserve(self, size_bytes: int) -> None:
        """Make sure that records taking `size_bytes` altogether (see `aligned`) fit; nothing is appended.

        May be called ahead of time, so that the first checkpoint does not wait for memory.

        Raises:
            NoRoomError: names the limit and how much is missing; the arena is as it was.
        """
        missing = self._position + size_bytes - self._held
        if missing <= 0:
            return
        growth = -(-missing // GROWTH_BYTES) * GROWTH_BYTES
        room = self._room(self.path.parent)
        if growth > room.usable_bytes:
            raise NoRoomError(f"{self.path} needs {growth >> 20} MiB more, and {room.sentence}")
        end = self._held + growth
        if end > len(self._map):
            raise NoRoomError(
                f"{self.path} needs {end >> 20} MiB, the limits were {len(self._map) >> 20} MiB when it was opened"
            )
        try:
            for start in range(self._held, end, RESERVATION_BYTES):
                size = min(RESERVATION_BYTES, end - start)
                if start > self._held and size > self._room(self.path.parent).usable_bytes:
                    # ranks ask at the same moment, and each had been told of the same room
                    raise OSError(errno.ENOSPC, "others have taken what was left")
                os.posix_fallocate(self._descriptor, start, size)
                self._populate(start, size)
        except OSError as error:
            os.ftruncate(self._descriptor, self._held)
            if error.errno not in limits.NO_ROOM:
                raise
            raise NoRoomError(f"{self.path} needs {growth >> 20} MiB more: {error.strerror}") from error
        self._held = end

    def allocate(self, size_bytes: int) -> int:
        """The offset of a new record, at a multiple of `ALIGNMENT_BYTES`. Its bytes are what they were before.

        Raises:
            NoRoomError: as `reserve`; nothing was appended.
        """
        taken = aligned(size_bytes)
        self.reserve(taken)
        offset = self._position
        self._position += taken
        return offset

    def append(self, data: bytes | bytearray | memoryview) -> int:
        """Copy a small buffer into a new record and return its offset. Holds the interpreter while it copies.

        Raises:
            NoRoomError: as `reserve`; nothing was appended.
        """
        with memoryview(data).cast("B") as source:
            offset = self.allocate(len(source))
            self._view[offset : offset + len(source)] = source
        return offset

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """A writable view of bytes of the arena, to copy into by other means. Let go of it before `close`."""
        assert 0 <= offset <= offset + size_bytes <= self._held, "a view beyond what was allocated"
        return self._view[offset : offset + size_bytes]

    def address(self, offset: int, size_bytes: int) -> int:
        """Where bytes of the arena lie in this process's memory, until `close`."""
        with self.view(offset, size_bytes) as view:
            return ctypes.addressof(ctypes.c_char.from_buffer(view))

    def close(self) -> None:
        """Unmap and close. The file and its memory stay until it is unlinked."""
        self._view.release()
        self._map.close()
        os.close(self._descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _populate(self, offset: int, size_bytes: int) -> None:
        """Fault the pages in now: one call instead of a fault in the midst of a copy for each page."""
        try:
            self._map.madvise(POPULATE_WRITE, offset, size_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel: the copies fault them in
                raise


class ArenaReader:
    """The reading side: the file as large as it is now, mapped for reading."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            CheckpointError: it is missing, empty or not a file of this user.
        """
        self.path = path
        descriptor = _open(path, os.O_RDONLY)
        try:
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap of an empty file is a ValueError
            raise CheckpointError(f"{path} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """A read-only view of a record. Let go of it before `close`.

        Raises:
            CheckpointError: the record is not inside the file.
        """
        if not 0 <= offset <= offset + size_bytes <= len(self._view):
            raise CheckpointError(
                f"{self.path} has {len(self._view)} bytes, a record of {size_bytes} at {offset} is not inside"
            )
        return self._view[offset : offset + size_bytes]

    def address(self, offset: int, size_bytes: int) -> int:
        """Where a record lies in this process's memory, for reading only and until `close`.

        Raises:
            CheckpointError: as `view`.
        """
        import numpy

        with self.view(offset, size_bytes) as view:
            return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)

    def close(self) -> None:
        """Unmap."""
        self._view.release()
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _held_bytes(descriptor: int, status: os.stat_result) -> int:
    """Memory from the file's beginning to its first hole: a rank that died while it opened it left one at the end."""
    if status.st_blocks * 512 >= status.st_size:
        return status.st_size
    return os.lseek(descriptor, 0, os.SEEK_HOLE) // GROWTH_BYTES * GROWTH_BYTES


def _open(path: Path, flags: int) -> int:
    """A descriptor of a regular file of this user; folders for everyone's files in memory are writable by all."""
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened: {error.strerror}") from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a file of this user")
    return descriptor


def _capacity(folder: Path) -> int:
    """The most bytes that the limits could ever allow a file of `folder`, in whole steps of growth."""
    totals = [room.total_bytes for room in limits.rooms(folder)]
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_size != resource.RLIM_INFINITY:
        totals.append(file_size)
    return max(GROWTH_BYTES, min(totals) // GROWTH_BYTES * GROWTH_BYTES)
