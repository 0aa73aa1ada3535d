"""Holds a process as a file system that hangs does: it does not run, and SIGKILL takes effect only when it is let go.

A process that waits for a dead NFS server is in uninterruptible sleep, which a test cannot have without such a server; a
frozen one behaves alike (the freezer of cgroups version 1; version 2 lets frozen processes be killed).
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FREEZER = Path("/sys/fs/cgroup/freezer")
WAIT_SECONDS = 10.0


def unsupported() -> str | None:
    """Why nothing can be frozen here, None when it can."""
    if not (FREEZER / "cgroup.procs").exists():
        return f"no freezer of cgroups version 1 at {FREEZER}"
    if not os.access(FREEZER, os.W_OK):
        return f"{FREEZER} cannot be written by this user"
    return None


class Freezer:
    """One group of frozen processes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def freeze(self, pid: int) -> None:
        """Hold a process; returns when it stands still."""
        (self._path / "cgroup.procs").write_text(str(pid))
        self._set("FROZEN")

    def thaw(self) -> None:
        """Let them all go on, or die of a SIGKILL sent meanwhile."""
        self._set("THAWED")

    def _set(self, state: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        (self._path / "freezer.state").write_text(state)
        while (self._path / "freezer.state").read_text().strip() != state:
            assert time.monotonic() < deadline, f"not {state}"
            time.sleep(0.01)


@contextmanager
def freezer() -> Iterator[Freezer]:
    """A group for as long as the block runs; what is in it then is let go."""
    path = Path(tempfile.mkdtemp(prefix="grpo-run-test-", dir=FREEZER))
    made = Freezer(path)
    try:
        yield made
    finally:
        made.thaw()
        deadline = time.monotonic() + WAIT_SECONDS
        while pids := (path / "cgroup.procs").read_text().split():
            for pid in pids:
                with suppress(OSError):  # gone meanwhile
                    (FREEZER / "cgroup.procs").write_text(pid)
            assert time.monotonic() < deadline, f"{path} does not become empty"
            time.sleep(0.01)
        path.rmdir()
