"""The snapshot buffer: one rank's memory for snapshots, in a file on a memory-backed file system.

The file is mapped once, its pages are faulted in once, and both are reused for every snapshot. A rank
appends with `SnapshotBuffer`; the drain worker, and ranks that load or compare a snapshot, read with
`SnapshotBufferReader`, whose views are read-only. The functions open the file, check that it lies in
memory, and free its memory; `slot.py` uses them too. Slots and their locks (`slot.py`) decide who may use a
buffer when, and the index (`index.py`) says what its bytes mean. Only one process may write at a time.
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

from grpo_run.runtime.errors import CheckpointError, NoHeadroomError
from grpo_run.runtime.files import NO_SPACE_ERRNOS, is_open_at
from grpo_run.runtime.snapshots.headroom import Headroom, least_headroom, measure_headroom


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


ALIGNMENT_BYTES = 64
"""Alignment of records: a cache line, and torch's own alignment of storages in files. No copy starts inside a
cache line and no two records share one. Page alignment would waste 4 KiB for each small optimizer tensor."""
GROWTH_BYTES = 4 << 20
"""The file grows in multiples of this: two huge pages, so that many small records cause few system calls."""
RESERVATION_BYTES = 64 << 20
"""Bytes per fallocate and madvise call. Calls must be short: a signal restarts them, and Python's mmap holds
the GIL while it faults pages in."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), Linux 5.14: fault pages in for writing. Python's mmap has no name for
it."""
DONT_DUMP = 16
"""MADV_DONTDUMP: keep model weights out of core files."""


def aligned(size_bytes: int) -> int:
    """Return the space that a record of `size_bytes` takes in a buffer."""
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class SnapshotBuffer:
    """The writing side. An existing file of this user is reused with its memory and contents.

    Address space for the largest size that the limits allow is mapped once. Memory is taken by `reserve`
    only. The mapping never moves, so views stay valid until `close`.
    """

    def __init__(self, path: Path, *, measure: Callable[[Path], Headroom] = least_headroom) -> None:
        """Open or create the file, with mode 0600.

        Args:
            path: a file in an existing folder on a memory-backed file system.
            measure: returns the headroom of a folder; called whenever the file grows.

        Raises:
            CheckpointError: the path is not a regular file of this user, or cannot be opened.
            NoHeadroomError: the address space cannot be mapped.
        """
        self.path = path
        self._measure = measure
        self._position = 0
        self._descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            os.fchmod(self._descriptor, 0o600)
            status = os.fstat(self._descriptor)
            self._held = _held_bytes(self._descriptor, status)
            capacity = max(self._held, _capacity(path.parent))
            # Python's mmap requires a file as long as the mapping; the kernel does not
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
            error_class = NoHeadroomError if error.errno in NO_SPACE_ERRNOS else CheckpointError
            raise error_class(f"{path} cannot be mapped: {error.strerror}") from error
        self._view = memoryview(self._map)

    @property
    def held_bytes(self) -> int:
        """Memory that the file holds, used or not."""
        return self._held

    @property
    def is_at_path(self) -> bool:
        """Whether the path still names this file, so that others can read what is written to it."""
        return is_open_at(self._descriptor, self.path)

    def begin(self) -> None:
        """Start a new snapshot at offset 0. Earlier records may be overwritten; memory that was not freed is kept."""
        self._position = 0
        self._held = _held_bytes(self._descriptor, os.fstat(self._descriptor))

    def reserve(self, size_bytes: int) -> None:
        """Take memory so that records of `size_bytes` in total (see `aligned`) fit. Appends nothing.

        May be called early, so that the first snapshot does not wait for memory.

        Raises:
            NoHeadroomError: names the limit and the missing size; the buffer is unchanged.
        """
        missing = self._position + size_bytes - self._held
        if missing <= 0:
            return
        growth = -(-missing // GROWTH_BYTES) * GROWTH_BYTES
        headroom = self._measure(self.path.parent)
        if growth > headroom.usable_bytes:
            raise NoHeadroomError(f"{self.path} needs {growth >> 20} MiB more, but {headroom.sentence}")
        end = self._held + growth
        if end > len(self._map):
            raise NoHeadroomError(
                f"{self.path} needs {end >> 20} MiB, but the limit was {len(self._map) >> 20} MiB when it was opened"
            )
        try:
            for start in range(self._held, end, RESERVATION_BYTES):
                size = min(RESERVATION_BYTES, end - start)
                if start > self._held and size > self._measure(self.path.parent).usable_bytes:
                    # ranks grow at the same time and each measured the same headroom
                    raise OSError(errno.ENOSPC, "another process has taken the remaining memory")
                os.posix_fallocate(self._descriptor, start, size)
                self._populate(start, size)
        except OSError as error:
            os.ftruncate(self._descriptor, self._held)
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            raise NoHeadroomError(f"{self.path} needs {growth >> 20} MiB more: {error.strerror}") from error
        self._held = end

    def allocate(self, size_bytes: int) -> int:
        """Append a record with undefined content and return its offset, a multiple of `ALIGNMENT_BYTES`.

        Raises:
            NoHeadroomError: as `reserve`; nothing is appended.
        """
        taken = aligned(size_bytes)
        self.reserve(taken)
        offset = self._position
        self._position += taken
        return offset

    def append(self, data: bytes | bytearray | memoryview) -> int:
        """Copy a small object into a new record and return its offset. Holds the GIL while copying.

        Raises:
            NoHeadroomError: as `reserve`; nothing is appended.
        """
        with memoryview(data).cast("B") as source:
            offset = self.allocate(len(source))
            self._view[offset : offset + len(source)] = source
        return offset

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return a writable view of the buffer. Release it before `close`."""
        assert 0 <= offset <= offset + size_bytes <= self._held, "the view exceeds the reserved memory"
        return self._view[offset : offset + size_bytes]

    def address(self, offset: int, size_bytes: int) -> int:
        """Return the address of buffer bytes in this process, valid until `close`."""
        with self.view(offset, size_bytes) as view:
            return ctypes.addressof(ctypes.c_char.from_buffer(view))

    def close(self) -> None:
        """Unmap and close the file. The file keeps its memory until it is unlinked."""
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
        """Fault pages in with one call, instead of one page fault per page during the copy."""
        try:
            self._map.madvise(POPULATE_WRITE, offset, size_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel: pages are faulted in by the copy
                raise


def _held_bytes(descriptor: int, status: os.stat_result) -> int:
    """Return the size up to the first hole. A rank that dies while opening leaves a hole at the end."""
    if status.st_blocks * 512 >= status.st_size:
        return status.st_size
    return os.lseek(descriptor, 0, os.SEEK_HOLE) // GROWTH_BYTES * GROWTH_BYTES


def _capacity(folder: Path) -> int:
    """Return the largest size that the limits allow a file in `folder`, a multiple of `GROWTH_BYTES`."""
    totals = [headroom.total_bytes for headroom in measure_headroom(folder)]
    file_size, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if file_size != resource.RLIM_INFINITY:
        totals.append(file_size)
    return max(GROWTH_BYTES, min(totals) // GROWTH_BYTES * GROWTH_BYTES)


class SnapshotBufferReader:
    """The reading side: maps the file at its present size, read-only."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            CheckpointError: the file is missing, empty or not of this user.
        """
        self.path = path
        descriptor = open_own(path, os.O_RDONLY)
        try:
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # mmap of an empty file is a ValueError
            raise CheckpointError(f"{path} cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)

    def view(self, offset: int, size_bytes: int) -> memoryview:
        """Return a read-only view of a record. Release it before `close`.

        Raises:
            CheckpointError: the record is outside the file.
        """
        if not 0 <= offset <= offset + size_bytes <= len(self._view):
            raise CheckpointError(
                f"{self.path} has {len(self._view)} bytes, but a record has {size_bytes} bytes at offset {offset}"
            )
        return self._view[offset : offset + size_bytes]

    def address(self, offset: int, size_bytes: int) -> int:
        """Return the address of a record in this process, for reading only, valid until `close`.

        Raises:
            CheckpointError: as `view`.
        """
        import numpy

        with self.view(offset, size_bytes) as view:
            return int(numpy.frombuffer(view, numpy.uint8).ctypes.data)

    def close(self) -> None:
        """Unmap the file."""
        self._view.release()
        self._map.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
