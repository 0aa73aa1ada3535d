"""Freeze a process with cgroup v1, as a hanging file system does: SIGKILL takes effect only after thawing.

A process that waits for a dead NFS server is in uninterruptible sleep, which a test cannot produce without
such a server. A process frozen by the cgroup v1 freezer behaves the same; with cgroup v2, a frozen process
can be killed.
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
    """Return why processes cannot be frozen here, or None."""
    if not (FREEZER / "cgroup.procs").exists():
        return f"no cgroup v1 freezer at {FREEZER}"
    if not os.access(FREEZER, os.W_OK):
        return f"{FREEZER} is not writable"
    return None


class Freezer:
    """A freezer cgroup."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def freeze(self, pid: int) -> None:
        """Freeze a process; return when it has stopped."""
        (self._path / "cgroup.procs").write_text(str(pid))
        self._set("FROZEN")

    def thaw(self) -> None:
        """Resume all processes; a SIGKILL sent meanwhile takes effect."""
        self._set("THAWED")

    def _set(self, state: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        (self._path / "freezer.state").write_text(state)
        while (self._path / "freezer.state").read_text().strip() != state:
            assert time.monotonic() < deadline, f"not {state}"
            time.sleep(0.01)


@contextmanager
def freezer() -> Iterator[Freezer]:
    """Create a freezer cgroup for the block; thaw its processes at the end."""
    path = Path(tempfile.mkdtemp(prefix="grpo-run-test-", dir=FREEZER))
    made = Freezer(path)
    try:
        yield made
    finally:
        made.thaw()
        deadline = time.monotonic() + WAIT_SECONDS
        while pids := (path / "cgroup.procs").read_text().split():
            for pid in pids:
                with suppress(OSError):  # the process has exited
                    (FREEZER / "cgroup.procs").write_text(pid)
            assert time.monotonic() < deadline, f"{path} still has processes"
            time.sleep(0.01)
        path.rmdir()
