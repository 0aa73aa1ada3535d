"""The bytes of a board: a mapping for ranks, system calls for supervisor and commands.

`BoardBytes` is a mapping without a descriptor that a script could close. A rank writes several times per
step, and a store costs less than a system call. If the file is truncated, the ranks end, and the next attempt
gets a new file.

`BoardFile` reads and writes an open file with system calls. The file may be truncated at any time, and a
process that touches a mapped page beyond its end is killed by SIGBUS, which the supervisor must survive. A
read call returns less instead, or fails on a bad disk; what is missing reads as zeros, as if no rank had
written it. That is cheaper than asking for the size first (0.8 against 1.2 µs). On some network and
user-space file systems read calls do not see writes through mappings: the creator of a board tries it, and
refuses such a file system.
"""

from __future__ import annotations

import mmap
import os
import secrets
from functools import cached_property
from pathlib import Path

from grpo_run.runtime.files import close_with

_TRIAL_AT = 64
_TRIAL_BYTES = 8


class BoardBytes:
    """The bytes of a board, through a mapping of the whole file.

    Args:
        mapping: of the whole file.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.size_bytes = len(mapping)
        """The size that the file should have."""

    @property
    def mapping(self) -> mmap.mmap:
        """The mapped file, for the writers of slots and for the addresses that ranks wait at."""
        return self._mapping

    @property
    def has_full_size(self) -> bool:
        """Whether the file has that size; not known without a descriptor."""
        return True

    def is_at(self, path: Path) -> bool:
        """Whether the path names this file, and not another one of the same name; not known without a
        descriptor.
        """
        return True

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a copy of some bytes. Not atomic beyond eight aligned bytes."""
        return self._mapping[offset : offset + size_bytes]

    def write(self, offset: int, content: bytes) -> None:
        """Replace some bytes."""
        self._mapping[offset : offset + len(content)] = content


class BoardFile(BoardBytes):
    """The bytes of a board, through an open file.

    Args:
        descriptor: of the file. It is closed with this object.
        size_bytes: the size that the file should have.
        writable: whether the descriptor can write.
    """

    def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
        self.size_bytes = size_bytes
        self._descriptor = descriptor
        self._writable = writable
        self.close = close_with(self, descriptor)
        """Closes the descriptor, once."""

    def try_reads(self) -> None:
        """Find out whether read calls see what is written to mappings. Call it once, for a new board.

        Raises:
            OSError, ValueError: the file cannot be mapped, or they do not.
        """
        content = secrets.token_bytes(_TRIAL_BYTES)
        trial = slice(_TRIAL_AT, _TRIAL_AT + _TRIAL_BYTES)
        self.mapping[trial] = content
        seen = os.pread(self._descriptor, _TRIAL_BYTES, _TRIAL_AT) == content
        os.pwrite(self._descriptor, bytes(_TRIAL_BYTES), _TRIAL_AT)
        if not seen or self.mapping[trial] != bytes(_TRIAL_BYTES):
            raise ValueError(
                "on this file system, reads do not see what is written to mapped files; choose another with"
                " --run-dir"
            )

    @property
    def has_full_size(self) -> bool:
        """Whether the file has its size."""
        try:
            return os.fstat(self._descriptor).st_size >= self.size_bytes
        except OSError:  # removed on a network file system
            return False

    def is_at(self, path: Path) -> bool:
        """Whether the path names this file, and not another one of the same name."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(path))
        except OSError:
            return False

    @cached_property
    def mapping(self) -> mmap.mmap:
        """The mapped file, made when it is needed for the first time.

        Raises:
            OSError, ValueError: it cannot be mapped, or is too short.
        """
        access = mmap.ACCESS_WRITE if self._writable else mmap.ACCESS_READ
        return mmap.mmap(self._descriptor, self.size_bytes, access=access)

    def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a copy of some bytes; zeros where the file was truncated or cannot be read."""
        try:
            content = os.pread(self._descriptor, size_bytes, offset)
        except OSError:
            return bytes(size_bytes)
        return content if len(content) == size_bytes else content.ljust(size_bytes, b"\0")

    def write(self, offset: int, content: bytes) -> None:
        """Replace some bytes. Does nothing if the file was truncated."""
        if self.has_full_size:
            os.pwrite(self._descriptor, content, offset)
