"""Read the host's memory: of processes from /proc/PID/status, of limits from the cgroups and /proc/meminfo.

A process that has exited gives None. One process takes some 30 µs, a limit some 50 µs. Called by
`runtime/supervisor`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_run.watchdog.memory.cgroups import MOUNTED, MemoryCgroup, memory_cgroups, read_fields
from grpo_run.watchdog.memory.host_sample import LimitUse, ProcessMemory
from grpo_run.watchdog.processes import read_file

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SHARED_MEMORY = Path("/dev/shm")
_SIGKILL_PENDING = re.compile(rb"^S(?:ig|hd)Pnd:\s*[0-9a-f]*[13579bdf][0-9a-f]{2}\s*$", re.MULTILINE)
"""Bit 8 of a mask of pending signals in proc(5): SIGKILL is 9."""


def read_process(pid: int) -> ProcessMemory | None:
    """Return the memory of a process; None if it has exited, or has freed its memory already."""
    fields = read_fields(read_file(f"/proc/{pid}/status") or b"")
    if "VmRSS" not in fields:
        return None
    return ProcessMemory(
        anonymous_bytes=fields.get("RssAnon", 0) * 1024,
        file_bytes=fields.get("RssFile", 0) * 1024,
        shared_bytes=fields.get("RssShmem", 0) * 1024,
        pinned_bytes=(fields.get("VmLck", 0) + fields.get("VmPin", 0)) * 1024,
    )


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Return the anonymous memory of several processes, read from /proc/PID/statm, which is cheaper."""
    total = 0
    for pid in pids:
        words = (read_file(f"/proc/{pid}/statm") or b"").split()
        if len(words) >= 3:
            total += max(0, int(words[1]) - int(words[2])) * PAGE_BYTES
    return total


def is_dying(pid: int) -> bool:
    """Whether a process is gone, frees its memory, or has SIGKILL pending."""
    status = read_file(f"/proc/{pid}/status")
    return status is None or b"\nVmRSS:" not in status or _SIGKILL_PENDING.search(status) is not None


def groups_of(pid: int, mounted: Path = MOUNTED) -> list[MemoryCgroup]:
    """Return the memory cgroups of a process whose files exist, innermost first; empty if there are none."""
    return [
        group
        for group in memory_cgroups(read_file(f"/proc/{pid}/cgroup") or b"", mounted)
        if group.usage_bytes() is not None
    ]


def read_limits(groups: Sequence[MemoryCgroup]) -> tuple[LimitUse, ...]:
    """Return each limit of the cgroups and of the machine with its use, the nearest to its limit first."""
    found = []
    for group in groups:
        limit, usage, working_set = group.limit_bytes(), group.usage_bytes(), group.working_set()
        if limit is None or usage is None or working_set is None:
            continue
        used, shared = working_set
        found.append(
            LimitUse(
                name=f"the memory cgroup {group.folder}",
                limit_bytes=limit,
                usage_bytes=usage,
                working_set_bytes=used,
                shared_bytes=shared,
                hits=group.limit_hits(),
            )
        )
    machine = machine_use(read_file("/proc/meminfo") or b"")
    if machine is not None:
        found.append(machine)
    return tuple(sorted(found, key=lambda use: use.fraction, reverse=True))


def machine_use(meminfo: bytes) -> LimitUse | None:
    """Return the use of the machine's memory; its working set is what MemAvailable leaves. None if it is
    unknown.
    """
    fields = read_fields(meminfo)
    if not {"MemTotal", "MemFree", "MemAvailable"} <= fields.keys():
        return None
    total = fields["MemTotal"] * 1024
    return LimitUse(
        name="the machine's memory",
        limit_bytes=total,
        usage_bytes=total - fields["MemFree"] * 1024,
        working_set_bytes=max(0, total - fields["MemAvailable"] * 1024),
        shared_bytes=fields.get("Shmem", 0) * 1024,
    )


def read_shared_memory(folder: Path = SHARED_MEMORY) -> tuple[int, int]:
    """Return (used, total) bytes of the file system of shared memory; zeros if there is none."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0, 0
    total = status.f_blocks * status.f_frsize
    return total - status.f_bfree * status.f_frsize, total
