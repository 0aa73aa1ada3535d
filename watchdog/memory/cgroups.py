"""Memory cgroups of a process, versions 1 and 2: limit, usage, page cache, pressure, and kills by the kernel.

Used for the headroom of files in memory (`runtime.snapshots.headroom`), for the evidence
(`watchdog/evidence/_node_memory.py`) and while the ranks run (`host_memory`). Reads a few small files; sets
nothing and does not judge.
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
    """One memory cgroup: its folder, the names of its files, and the prefix of hierarchical fields in
    `memory.stat`.
    """

    folder: Path
    limit_file: str
    usage_file: str
    prefix: str

    def limit_bytes(self) -> int | None:
        """Return the limit, or None if there is none."""
        limit = _number(self._read(self.limit_file))
        return limit if limit is not None and limit < UNLIMITED_BYTES else None

    def usage_bytes(self) -> int | None:
        """Return the memory charged to the group, or None if unknown."""
        return _number(self._read(self.usage_file))

    def reclaimable_bytes(self) -> int:
        """Return the unused page cache, which the kernel frees before it kills a process."""
        return self._stat().get(f"{self.prefix}inactive_file", 0)

    def working_set(self) -> tuple[int, int] | None:
        """Return the usage without the page cache of files, and the part of it that is shared memory; None if
        unknown.

        The kernel can write page cache back and free it. Files in tmpfs count: they have no other place. Both
        lists of the page cache are left out, because a data set that is mapped and read often is on the
        active one.
        """
        usage = self.usage_bytes()
        if usage is None:
            return None
        fields = self._stat()
        cache = fields.get(f"{self.prefix}inactive_file", 0) + fields.get(f"{self.prefix}active_file", 0)
        return max(0, usage - cache), fields.get(f"{self.prefix}shmem", 0)

    def kills(self) -> int | None:
        """Return how many processes of the group itself, without its descendants, the kernel has killed for
        lack of memory; None if unknown.

        A process counts whichever limit was reached: of this group, of one above it, or the machine's memory
        (`__oom_kill_process` in mm/oom_kill.c). Before Linux 5.2, version 2 has only the sum with the
        descendants.
        """
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            count = read_fields(self._read(name)).get("oom_kill")
            if count is not None:
                return count
        return None

    def limit_hits(self) -> int | None:
        """Return how often an allocation has met the limit (version 1), or has failed because of it (version
        2).
        """
        if self.prefix:
            return _number(self._read("memory.failcnt"))
        return read_fields(self._read("memory.events")).get("oom")

    @property
    def kills_whole_group(self) -> bool:
        """Whether the kernel ends every process of the group when it ends one (version 2,
        `memory.oom.group`).
        """
        return _number(self._read("memory.oom.group")) == 1

    def full_pressure(self) -> float | None:
        """Return the share of the last 10 s in which every task of the group waited for memory, 0 to 1; None
        if unknown.

        Version 2 only, of a kernel with PSI: `avg10` of the line `full`.
        """
        for line in self._read("memory.pressure").decode(errors="replace").splitlines():
            words = line.split()
            if words[:1] == ["full"]:
                values = dict(word.partition("=")[::2] for word in words[1:])
                try:
                    return float(values["avg10"]) / 100
                except (KeyError, ValueError):
                    return None
        return None

    def _stat(self) -> dict[str, int]:
        return read_fields(self._read("memory.stat"))

    def _read(self, name: str) -> bytes:
        """The content of one of the files; empty if it cannot be read. Joining paths would cost as much as
        reading.
        """
        return read_file(f"{self.folder}/{name}") or b""


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
            root, limit, usage, prefix = mounted, "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            root, limit = mounted / "memory", "memory.limit_in_bytes"
            usage, prefix = "memory.usage_in_bytes", "total_"
        else:
            continue
        folder = root / path.strip("/")
        while True:
            groups.append(MemoryCgroup(folder=folder, limit_file=limit, usage_file=usage, prefix=prefix))
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


def _number(content: bytes) -> int | None:
    """The number in a file; None if there is none ("max" means no limit)."""
    text = content.strip()
    return int(text) if text.isdigit() else None
