"""Headroom in memory: how much a file in tmpfs may grow, from tmpfs itself, MemAvailable and the cgroup limits.

A write to a mapped page fails with SIGBUS if tmpfs is full, and the kernel kills the process if its memory cgroup is
full. Neither can be handled, so headroom is checked before memory is taken. Code that writes files without mapping
them can use `is_full` on the error instead. Called by `buffer.py` and by the ranks when they save. Reserves nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.files import NO_SPACE_ERRNOS
from grpo_run.watchdog.processes import read_file

FULL_BYTES = 1 << 20
"""A file system with less free space counts as full."""
RESERVE_FRACTION = 0.05
"""Part of each limit that stays free for other users of it: the next step's allocations, data loaders, NCCL."""
RESERVE_MINIMUM_BYTES = 64 << 20
"""Lower bound of the reserve: what a Python process may allocate at once (a garbage collection, a batch)."""
RESERVE_MAXIMUM_BYTES = 4 << 30
"""Upper bound of the reserve: on large machines 5 % is more than other users need."""
UNLIMITED_BYTES = 1 << 60
"""cgroup version 1 reports "no limit" as a number near 2**63."""


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Free memory under one limit.

    Attributes:
        name: which limit, for messages.
        free_bytes: free memory, including what the kernel can reclaim.
        total_bytes: the limit itself.
    """

    name: str
    free_bytes: int
    total_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Free bytes beyond the reserve; 0 if there are none."""
        reserve = max(
            RESERVE_MINIMUM_BYTES, min(RESERVE_MAXIMUM_BYTES, int(RESERVE_FRACTION * self.total_bytes))
        )
        return max(0, self.free_bytes - reserve)

    @property
    def sentence(self) -> str:
        """The headroom as a message for the user."""
        return (
            f"{self.name} has {self.free_bytes >> 20} MiB free, {self.usable_bytes >> 20} MiB of them usable"
        )


def measure_headroom(folder: Path) -> list[Headroom]:
    """Return the headroom of every limit that applies to a file in `folder`: its file system, memory and cgroups.

    Raises:
        OSError: the file system of `folder` cannot be queried.
    """
    status = os.statvfs(folder)
    found = [
        Headroom(
            name=f"the file system of {folder}",
            free_bytes=status.f_bavail * status.f_frsize,
            total_bytes=status.f_blocks * status.f_frsize,
        )
    ]
    machine = machine_headroom(read_file("/proc/meminfo") or b"")
    if machine is not None:
        found.append(machine)
    return found + cgroup_headroom(read_file("/proc/self/cgroup") or b"")


def least_headroom(folder: Path) -> Headroom:
    """Return the limit with the fewest usable bytes. Raises as `measure_headroom`."""
    return min(measure_headroom(folder), key=lambda headroom: headroom.usable_bytes)


def is_full(error: BaseException, folder: Path) -> bool:
    """Return True if an error means that a file system is full: by its errno, or by the free space if it has none.

    Args:
        folder: a folder of the file system that was written to.

    Raises:
        OSError: the file system of `folder` cannot be queried.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_SPACE_ERRNOS
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize < FULL_BYTES


def machine_headroom(meminfo: bytes) -> Headroom | None:
    """Return MemAvailable of `/proc/meminfo` (proc(5): memory available without swapping), or None if absent."""
    fields = _fields(meminfo)
    if "MemAvailable" not in fields or "MemTotal" not in fields:
        return None
    return Headroom(
        name="the machine's memory",
        free_bytes=fields["MemAvailable"] * 1024,
        total_bytes=fields["MemTotal"] * 1024,
    )


def cgroup_headroom(membership: bytes, mounted: Path = Path("/sys/fs/cgroup")) -> list[Headroom]:
    """What each memory cgroup above a process leaves, innermost first; both versions of cgroups.

    Pages of a file in memory are charged to the cgroup of the process that touches them first. Unused page
    cache counts as free, as the kernel gives it up before it kills (the same sum as kubelet's working set).

    Args:
        membership: `/proc/<pid>/cgroup`.
        mounted: where cgroups are; a container mounts its own as the root, so missing folders are passed over.
    """
    found = []
    for line in membership.decode(errors="replace").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            root, limit, usage, cache = mounted, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit = mounted / "memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / path.strip("/")
        while True:
            headroom = _one_cgroup_headroom(group, limit, usage, cache)
            if headroom is not None:
                found.append(headroom)
            if group == root or root not in group.parents:
                break
            group = group.parent
    return found


def _one_cgroup_headroom(group: Path, limit_name: str, usage_name: str, cache_name: str) -> Headroom | None:
    limit = _number(group / limit_name)
    usage = _number(group / usage_name)
    if limit is None or usage is None or limit >= UNLIMITED_BYTES:
        return None
    cache = _fields(read_file(str(group / "memory.stat")) or b"").get(cache_name, 0)
    return Headroom(
        name=f"the memory cgroup {group}", free_bytes=max(0, limit - usage + cache), total_bytes=limit
    )


def _number(file: Path) -> int | None:
    """The file's number; None where there is none ("max" is no limit)."""
    text = (read_file(str(file)) or b"").strip()
    return int(text) if text.isdigit() else None


def _fields(content: bytes) -> dict[str, int]:
    """`name value` and `name: value unit` lines, as the kernel writes them."""
    found = {}
    for line in content.decode(errors="replace").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found
