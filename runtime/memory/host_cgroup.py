"""A memory cgroup for the ranks below that of the supervisor, and the kernel's counter of killed processes.

A process that the kernel kills for lack of memory is counted in its own cgroup, whichever limit was
reached, so the counters of cgroups above are not read. A counter comes with what tells its cgroup from
another of the same name. Called by the supervisor at its start, while samples are made
(`host_accounting.py`), by the guardian and by the next launch. Judges nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from grpo_run.runtime.files import BOOT_ID
from grpo_run.watchdog.memory.cgroups import MOUNTED, MemoryCgroup, own_kills
from grpo_run.watchdog.memory.host_reading import groups_of
from grpo_run.watchdog.memory.host_sample import CgroupKills
from grpo_run.watchdog.processes import read_file

PREFIX = "grpo-run-"
REMOVE_SECONDS = 2.0
"""How long processes that were killed may take to leave the group."""
POLL_SECONDS = 0.02


class OwnCgroup:
    """The group of one supervisor's ranks.

    Args:
        folder: of the group; None if none could be made.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._made_by = os.getpid()

    @classmethod
    def make(cls, mounted: Path = MOUNTED) -> OwnCgroup:
        """Make the group below that of this process."""
        groups = groups_of(os.getpid(), mounted)
        if not groups or not _is_hierarchical(groups[0]):
            return cls(None)
        parent = groups[0].folder
        folder = parent / f"{PREFIX}{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            return cls(None)
        if (folder / groups[0].usage_file).exists() and (folder / groups[0].kills_file).exists():
            return cls(folder)
        _remove(folder)  # version 2, and memory is not accounted below the parent
        return cls(None)

    def enter(self, pid: int) -> None:
        """Move a process into the group. Its children are in it from then on."""
        if self.folder is not None:
            _move(pid, self.folder)

    def remove(self) -> None:
        """Remove the group, and those of supervisors that have died together with their guardians.

        Processes that are still in it are moved to the group above. The groups of others are not removed
        earlier, because the next launch of their run reads their counter.
        """
        if self.folder is not None and os.getpid() == self._made_by:  # and not in a process that was forked
            remove_cgroup(self.folder)
            _remove_abandoned(self.folder.parent)


def remove_cgroup(folder: Path) -> None:
    """Remove a group that `OwnCgroup` has made; what is in it is moved to the group above."""
    deadline = time.monotonic() + REMOVE_SECONDS
    while folder.exists():
        for pid in (read_file(str(folder / "cgroup.procs")) or b"").split():
            _move(int(pid), folder.parent)
        if _remove(folder) or time.monotonic() > deadline:
            return
        time.sleep(POLL_SECONDS)


def _is_hierarchical(group: MemoryCgroup) -> bool:
    """Whether the group's limit holds for its children: always, except in version 1 on old kernels."""
    content = read_file(str(group.folder / "memory.use_hierarchy"))
    return content is None or content.strip() == b"1"


def _remove_abandoned(parent: Path) -> None:
    """Remove groups of supervisors that are dead. A group with processes stays."""
    with contextlib.suppress(OSError):
        for folder in parent.glob(f"{PREFIX}*"):
            number = folder.name[len(PREFIX) :]
            if number.isdigit() and not Path(f"/proc/{number}").exists():
                _remove(folder)


def _move(pid: int, folder: Path) -> None:
    with contextlib.suppress(OSError):  # it has exited, or may not be moved
        (folder / "cgroup.procs").write_text(str(pid))


def _remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError:
        return False
    return True


def read_cgroup_kills(folder: str) -> CgroupKills | None:
    """Return the counter of a cgroup; None if it is gone, or does not count."""
    try:
        identity = f"{BOOT_ID.read_text().strip()} {os.stat(folder).st_ino}"
    except OSError:
        return None
    count = own_kills(Path(folder))
    return None if count is None else CgroupKills(folder=folder, identity=identity, count=count)
