"""Whether the previous supervisor of the run was probably killed by the kernel's OOM killer, together with its ranks.

With `memory.oom.group`, and in some containers, the kernel ends a whole cgroup at once. Nobody is left to read its counter, so
the next launch looks at the last sample, and at the counter if the same cgroup still exists. It is a report, not a proof.
"""

from __future__ import annotations

import time
from pathlib import Path

from grpo_run.runtime.record.history import History
from grpo_run.watchdog.cgroups import read_fields
from grpo_run.watchdog.host_memory.pressure import shortage
from grpo_run.watchdog.host_memory.sample import HostSample, describe_use
from grpo_run.watchdog.processes import read_file

RECENT_SECONDS = 60.0
"""The last sample must be at most so much older than the last event of the journal."""


def suspected(sample: HostSample | None, history: History) -> str | None:
    """Return a sentence if the last supervisor has ended without a word while memory was short; else None.

    Args:
        sample: the last one of that supervisor.
        history: before the event of this launch.
    """
    if sample is None or history.supervisors == 0 or history.exit_code is not None:
        return None
    if abs((history.time.last or 0.0) - sample.at) > RECENT_SECONDS:
        return None
    killed = _kills_since(sample)
    short = shortage(sample)
    if short is None and not killed:
        return None
    at = time.strftime("%H:%M:%S", time.localtime(sample.at))
    nearest = sample.nearest
    if short is not None:
        state = short.replace(" is in use", " was in use").replace(" have waited ", " had waited ")
    else:
        state = (
            f"{nearest.fraction:.0%} of {nearest.name} was in use"
            if nearest is not None
            else "memory was in use"
        )
    use = describe_use(sample, nearest)
    counted = f" The kernel has killed {killed} processes of that cgroup since." if killed else ""
    together = (
        " memory.oom.group=1 makes the kernel end all of its processes together."
        if sample.kills_whole_group
        else ""
    )
    return (
        "the last supervisor of this run ended without a record, probably killed by the kernel because memory was full: at"
        f" {at}, {state}{f' ({use})' if use else ''}.{counted}{together}"
    )


def _kills_since(sample: HostSample) -> int:
    """How many processes of the sample's cgroup the kernel has killed since; 0 if that is not known."""
    if not sample.cgroup or sample.kills is None:
        return 0
    for name in ("memory.events", "memory.oom_control"):
        fields = read_fields(read_file(str(Path(sample.cgroup) / name)) or b"")
        if "oom_kill" in fields:
            return max(0, fields["oom_kill"] - sample.kills)
    return 0
