"""A small tmpfs that a test fills: `with small_disk(path) as disk: disk.leave(4096)`.

Mounting needs root.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

BALLAST = "ballast"
RESIZE_SECONDS = 10.0


class SmallDisk:
    """A mounted tmpfs. Tests use `folder`; the ballast file is beside it."""

    def __init__(self, mounted: Path) -> None:
        self._ballast = mounted / BALLAST
        self._mounted = mounted
        self.folder = mounted / "out"
        self.folder.mkdir()

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self._mounted)
        return status.f_bavail * status.f_frsize

    def leave(self, size_bytes: int) -> None:
        """Resize the ballast until `size_bytes` are free, to the page.

        A run may write to the disk at the same time. If it takes space between the measurement and the
        allocation, both are repeated.

        Raises:
            OSError: the run took space every time for `RESIZE_SECONDS`.
        """
        deadline = time.monotonic() + RESIZE_SECONDS
        descriptor = os.open(self._ballast, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not self._try_to_leave(descriptor, size_bytes):
                if time.monotonic() > deadline:
                    raise OSError(errno.ENOSPC, "other processes take the free space", str(self._ballast))
        finally:
            os.close(descriptor)

    def _try_to_leave(self, ballast: int, size_bytes: int) -> bool:
        """Return False if another process took space that the ballast needs."""
        held = os.fstat(ballast).st_size
        wanted = max(0, held + self.free_bytes - size_bytes)
        if wanted <= held:
            os.ftruncate(ballast, wanted)
            return True
        try:
            os.posix_fallocate(ballast, held, wanted - held)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return False
        return True

    def empty(self) -> None:
        """Remove the ballast."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(mount_point: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a small tmpfs for the block. Skip the test if this user may not mount."""
    mount_point.mkdir()
    answer = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "grpo-run-test", str(mount_point)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    if answer.returncode != 0:
        mount_point.rmdir()
        pytest.skip(f"cannot mount a small file system: {answer.stderr.strip()}")
    try:
        yield SmallDisk(mount_point)
    finally:
        # lazily: a process of a failed test may still have a file open
        subprocess.run(["umount", "-l", str(mount_point)], check=True, timeout=30)
        with suppress(OSError):
            mount_point.rmdir()
