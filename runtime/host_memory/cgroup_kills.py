"""The kernel's counter of killed processes of one memory cgroup, with what tells the cgroup from another of the same name.

A process that the kernel kills for lack of memory is counted in its own cgroup, whichever limit was reached. So the counters
of cgroups above hold no process of the run, and are not read. Called while samples are made (`accounting.py`), by the guardian
and by the next launch. Judges nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from grpo_run.runtime.files import BOOT_ID
from grpo_run.watchdog.cgroups import own_kills
from grpo_run.watchdog.host_memory.sample import CgroupKills


def read_cgroup_kills(folder: str) -> CgroupKills | None:
    """Return the counter of a cgroup; None if it is gone, or does not count."""
    try:
        identity = f"{BOOT_ID.read_text().strip()} {os.stat(folder).st_ino}"
    except OSError:
        return None
    count = own_kills(Path(folder))
    return None if count is None else CgroupKills(folder=folder, identity=identity, count=count)
