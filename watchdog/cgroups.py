"""Memory cgroups of a process, versions 1 and 2: which files hold limit, usage and reclaimable cache.

Used for the headroom of files in memory (`runtime.staging.headroom`) and for the evidence
(`evidence/node_memory.py`). Reads a few small files; sets nothing and does not judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from grpo_run.watchdog.processes import read_file

MOUNTED = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60
"""cgroup version 1 writes "no limit" as a number near 2**63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCgroup:
    """One memory cgroup: its folder, and the names of its files and of the cache's field in `memory.stat`."""

    folder: Path
    limit_file: str
    usage_file: str
    cache_field: str

    def limit_bytes(self) -> int | None:
        """Return the limit, or None if there is none."""
        limit = _number(self.folder / self.limit_file)
        return limit if limit is not None and limit < UNLIMITED_BYTES else None

    def usage_bytes(self) -> int | None:
        """Return the memory charged to the group, or None if unknown."""
        return _number(self.folder / self.usage_file)

    def reclaimable_bytes(self) -> int:
        """Return the unused page cache, which the kernel frees before it kills a process."""
        return read_fields(read_file(str(self.folder / "memory.stat")) or b"").get(self.cache_field, 0)


def memory_cgroups(membership: bytes, mounted: Path = MOUNTED) -> list[MemoryCgroup]:
    """Return the memory cgroups of a process, innermost first, up to and including the root.

    A folder need not exist: inside a container the process's own group is mounted as the root.

    Args:
        membership: contents of `/proc/PID/cgroup`.
        mounted: where the cgroup file systems are mounted.
    """
    groups = []
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
        folder = root / path.strip("/")
        while True:
            groups.append(MemoryCgroup(folder=folder, limit_file=limit, usage_file=usage, cache_field=cache))
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
    return groups


def read_fields(content: bytes) -> dict[str, int]:
    """Parse `name value` and `name: value unit` lines, as the kernel writes them."""
    found = {}
    for line in content.decode(errors="replace").splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = int(words[1])
    return found


def _number(file: Path) -> int | None:
    """The number in a file; None if there is none ("max" means no limit)."""
    text = (read_file(str(file)) or b"").strip()
    return int(text) if text.isdigit() else None
