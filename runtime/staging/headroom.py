"""How many bytes a file held in memory may still grow by: the file system's, the machine's and the cgroup's say.

A full file system in memory answers a write to a mapped page with SIGBUS, a full memory cgroup with a kill: neither
can be handled, so room is asked for before it is taken; what writes files itself finds out by an error (`is_full`).
Called by `buffer.py` and by who saves. Takes no room itself.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from grpo_run.watchdog.processes import read_file

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
"""What asking for room fails with when there is none; anything else is no question of room."""
FULL_BYTES = 1 << 20
"""A file system with less is full."""
RESERVE_FRACTION = 0.05
"""Of each limit, left free for whoever else lives under it: the next step's allocations, data loaders, NCCL."""
RESERVE_MINIMUM_BYTES = 64 << 20
"""Even of a small limit: what a Python process takes in a moment (a garbage collection, a batch)."""
RESERVE_MAXIMUM_BYTES = 4 << 30
"""On large machines 5 % would be wasted on a guard against small surprises."""
UNLIMITED_BYTES = 1 << 60
"""cgroup version 1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What one limit leaves: `name` says which, for a person; `free_bytes` counts what the kernel can reclaim."""

    name: str
    free_bytes: int
    total_bytes: int

    @property
    def usable_bytes(self) -> int:
        """Free bytes beyond the reserve; 0 when there are none."""
        reserve = max(
            RESERVE_MINIMUM_BYTES, min(RESERVE_MAXIMUM_BYTES, int(RESERVE_FRACTION * self.total_bytes))
        )
        return max(0, self.free_bytes - reserve)

    @property
    def sentence(self) -> str:
        """What is left, for a person."""
        return f"{self.name} has {self.free_bytes >> 20} MiB free, of which {self.usable_bytes >> 20} MiB may be taken"


def rooms(folder: Path) -> list[Room]:
    """Every limit that a file in `folder` and its pages are under, now.

    Raises:
        OSError: the folder's file system does not answer.
    """
    status = os.statvfs(folder)
    found = [
        Room(
            name=f"the file system of {folder}",
            free_bytes=status.f_bavail * status.f_frsize,
            total_bytes=status.f_blocks * status.f_frsize,
        )
    ]
    machine = machine_room(read_file("/proc/meminfo") or b"")
    if machine is not None:
        found.append(machine)
    return found + cgroup_rooms(read_file("/proc/self/cgroup") or b"")


def tightest(folder: Path) -> Room:
    """The limit that leaves least.

    Raises:
        OSError: the folder's file system does not answer.
    """
    return min(rooms(folder), key=lambda room: room.usable_bytes)


def is_full(error: BaseException, folder: Path) -> bool:
    """Whether an error comes of a full file system: by its number, or by what is left where a library gives none.

    Args:
        folder: on the file system that was written to.

    Raises:
        OSError: the folder's file system does not answer.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in NO_ROOM
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize < FULL_BYTES


def machine_room(meminfo: bytes) -> Room | None:
    """MemAvailable of `/proc/meminfo` (proc(5): what can be had without swapping); None when it is not there."""
    fields = _fields(meminfo)
    if "MemAvailable" not in fields or "MemTotal" not in fields:
        return None
    return Room(
        name="the machine's memory",
        free_bytes=fields["MemAvailable"] * 1024,
        total_bytes=fields["MemTotal"] * 1024,
    )


def cgroup_rooms(membership: bytes, mounted: Path = Path("/sys/fs/cgroup")) -> list[Room]:
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
            room = _cgroup_room(group, limit, usage, cache)
            if room is not None:
                found.append(room)
            if group == root or root not in group.parents:
                break
            group = group.parent
    return found


def _cgroup_room(group: Path, limit_name: str, usage_name: str, cache_name: str) -> Room | None:
    limit = _number(group / limit_name)
    usage = _number(group / usage_name)
    if limit is None or usage is None or limit >= UNLIMITED_BYTES:
        return None
    cache = _fields(read_file(str(group / "memory.stat")) or b"").get(cache_name, 0)
    return Room(
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
