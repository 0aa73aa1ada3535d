"""Headroom in memory: how much a file may grow under the limits of tmpfs, MemAvailable and cgroups.

The kernel kills a process whose memory cgroup is full, which cannot be handled, so headroom is checked before
memory is taken. A full file system is an error of the write; `is_full` recognizes it. Called by the ranks
when they save and by the drain worker. Reserves nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.files import NO_SPACE_ERRNOS
from grpo_run.watchdog.memory.cgroups import MOUNTED, memory_cgroups, read_fields
from grpo_run.watchdog.processes import read_file
from grpo_run.watchdog.text import size_text

FULL_BYTES = 1 << 20
"""A file system with less free space counts as full."""
DISK_RESERVE_BYTES = 64 << 20
"""Stays free on the disk of a checkpoint for the run's journal, logs and incidents. At the end of the run,
when only its last events are still to be written, `FULL_BYTES` stay free."""


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """What stays free of a limit: a part of it, with a lower and an upper bound."""

    fraction: float
    minimum_bytes: int
    maximum_bytes: int

    def of(self, total_bytes: int) -> int:
        """Return the reserve of a limit."""
        return max(self.minimum_bytes, min(self.maximum_bytes, int(self.fraction * total_bytes)))


FILE_SYSTEM_RESERVE = Reserve(fraction=0.05, minimum_bytes=64 << 20, maximum_bytes=4 << 30)
"""For other files in memory: data loaders, NCCL. At least what a Python process may allocate at once; 5 %
of a large one are more than they need."""
MEMORY_RESERVE = Reserve(fraction=0.15, minimum_bytes=256 << 20, maximum_bytes=48 << 30)
"""For the ranks themselves. Files stay in memory when ranks are restarted, so they must end well below the
share of the limit at which memory is short (`watchdog.memory.host_pressure`): otherwise every restart would
find it short again."""


@dataclass(frozen=True, kw_only=True)
class Headroom:
    """Free memory under one limit.

    Attributes:
        name: which limit, for messages.
        free_bytes: free memory, including what the kernel can reclaim.
        total_bytes: the limit itself.
        reserve: what must stay free of it.
    """

    name: str
    free_bytes: int
    total_bytes: int
    reserve: Reserve = FILE_SYSTEM_RESERVE

    @property
    def usable_bytes(self) -> int:
        """Free bytes beyond the reserve; 0 if there are none."""
        return max(0, self.free_bytes - self.reserve.of(self.total_bytes))

    @property
    def sentence(self) -> str:
        """The headroom as a message for the user."""
        free, usable = size_text(self.free_bytes), size_text(self.usable_bytes)
        return f"{self.name} has {free} free, {usable} of them usable"


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
    return found + memory_headroom()


def memory_headroom() -> list[Headroom]:
    """Return the headroom of each limit on the memory of this process: the machine and its cgroups."""
    machine = machine_headroom(read_file("/proc/meminfo") or b"")
    found = [machine] if machine is not None else []
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
        reserve=MEMORY_RESERVE,
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
            found.append(Headroom(name=name, free_bytes=free, total_bytes=limit, reserve=MEMORY_RESERVE))
    return found
