"""The reading side of a snapshot buffer: views of its records, read-only.

Used by the drain worker, and by ranks that load a snapshot or compare one. Who may read when is decided by slots (`slot.py`).
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.staging.buffer_file import open_own


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
