"""Headroom in memory: how much a file may grow under the limits of tmpfs, MemAvailable and cgroups.

A write to a mapped page fails with SIGBUS if tmpfs is full, and the kernel kills the process if its memory
cgroup is full. Neither can be handled, so headroom is checked before memory is taken. Code that writes files
without mapping them can use `is_full` on the error instead. Called by `buffer.py` and by the ranks when they
save. Reserves nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.files import NO_SPACE_ERRNOS
from grpo_run.watchdog.cgroups import MOUNTED, memory_cgroups, read_fields
from grpo_run.watchdog.processes import read_file

FULL_BYTES = 1 << 20
"""A file system with less free space counts as full."""
RESERVE_FRACTION = 0.05
"""Part of each limit that stays free for other users of it: the next step's allocations, data loaders, NCCL.
"""
RESERVE_MINIMUM_BYTES = 64 << 20
"""Lower bound of the reserve: what a Python process may allocate at once (a garbage collection, a batch)."""
RESERVE_MAXIMUM_BYTES = 4 << 30
"""Upper bound of the reserve: on large machines 5 % is more than other users need."""


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
    """Return the headroom of each limit on a file in `folder`: file system, memory and cgroups.

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
    """Return True if an error means a full file system: by its errno, or else by the free space.

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
    """Return MemAvailable of `/proc/meminfo` (proc(5): available without swapping), or None if absent."""
    fields = read_fields(meminfo)
    if "MemAvailable" not in fields or "MemTotal" not in fields:
        return None
    return Headroom(
        name="the machine's memory",
        free_bytes=fields["MemAvailable"] * 1024,
        total_bytes=fields["MemTotal"] * 1024,
    )


def cgroup_headroom(membership: bytes, mounted: Path = MOUNTED) -> list[Headroom]:
    """Return the headroom of every memory cgroup of a process that has a limit, innermost first.

    Pages of a file in tmpfs are charged to the cgroup of the process that touches them first. Unused page
    cache counts as free, because the kernel frees it before it kills a process (as in the kubelet's working
    set).

    Args:
        membership: contents of `/proc/PID/cgroup`.
        mounted: where the cgroup file systems are mounted.
    """
    found = []
    for group in memory_cgroups(membership, mounted):
        limit, usage = group.limit_bytes(), group.usage_bytes()
        if limit is not None and usage is not None:
            free = max(0, limit - usage + group.reclaimable_bytes())
            name = f"the memory cgroup {group.folder}"
            found.append(Headroom(name=name, free_bytes=free, total_bytes=limit))
    return found
