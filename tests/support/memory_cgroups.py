"""Memory cgroups with a limit, in which a run is started: the kernel kills its processes when the limit is
reached.

Version 1 where the memory controller is mounted alone, else version 2. Making one needs root, and a hierarchy
that may be written; `missing` says why not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

_MOUNTED = Path("/sys/fs/cgroup")
_PARENT = _MOUNTED / "memory" if (_MOUNTED / "memory").is_dir() else _MOUNTED
_LIMIT, _USAGE = (
    ("memory.limit_in_bytes", "memory.usage_in_bytes")
    if _PARENT.name == "memory"
    else ("memory.max", "memory.current")
)
REMOVE_SECONDS = 10.0


def missing() -> str | None:
    """Return why no memory cgroup can be made here, or None."""
    folder = _PARENT / f"grpo-run-probe-{os.getpid()}"
    try:
        folder.mkdir()
        try:
            (folder / _LIMIT).write_text(str(1 << 30))
        finally:
            folder.rmdir()
    except OSError as error:
        return f"memory cgroups cannot be made: {error}"
    return None


class MemoryCgroup:
    """A cgroup for one test.

    Args:
        limit_bytes: of all its processes and files in memory together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.folder = _PARENT / f"grpo-run-test-{os.getpid()}-{time.monotonic_ns()}"
        self.folder.mkdir()
        self.set_limit(limit_bytes)

    @property
    def program(self) -> tuple[str, ...]:
        """What a run is started with to be in the group; for `support.runs.Run`."""
        from support.runs import special  # not for unit tests

        return special("cgroup", str(self.folder))

    def set_limit(self, limit_bytes: int) -> None:
        """Change the limit."""
        (self.folder / _LIMIT).write_text(str(limit_bytes))

    def usage_bytes(self) -> int:
        """Return what is charged to the group now."""
        return int((self.folder / _USAGE).read_text())

    def working_set_bytes(self) -> int:
        """Return what is charged to the group without page cache."""
        words = (self.folder / "memory.stat").read_text().split()
        prefix = "total_" if _PARENT.name == "memory" else ""
        cache = sum(int(words[words.index(f"{prefix}{name}_file") + 1]) for name in ("inactive", "active"))
        return self.usage_bytes() - cache

    def kills(self) -> int:
        """Return how many processes of it and of its descendants the kernel has killed."""
        total = 0
        for file in (*self.folder.rglob("memory.oom_control"), self.folder / "memory.events"):
            with contextlib.suppress(OSError):
                words = file.read_text().split()
                total += int(words[words.index("oom_kill") + 1])
        return total

    def remove(self) -> None:
        """Remove the group and its descendants, once every process has left."""
        deadline = time.monotonic() + REMOVE_SECONDS
        while self.folder.exists():
            for folder in sorted(
                (one for one in self.folder.rglob("*") if one.is_dir()), key=lambda one: -len(one.parts)
            ):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@contextlib.contextmanager
def memory_cgroup(limit_bytes: int) -> Iterator[MemoryCgroup]:
    """Make a cgroup for the block. Its processes must have ended at the end."""
    group = MemoryCgroup(limit_bytes)
    try:
        yield group
    finally:
        group.remove()
