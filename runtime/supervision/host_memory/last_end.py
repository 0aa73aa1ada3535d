"""Whether the kernel's OOM killer has ended the previous supervisor of the run, alone or together with its ranks.

The guardian reads the counter of killed processes of the supervisor's cgroup as soon as the supervisor has ended: compared
with the last sample, seconds before, that settles it. If the guardian was killed too, as with `memory.oom.group`, the next
launch can read the counter, if that cgroup still exists, but others of its processes may have been killed meanwhile.
"""

from __future__ import annotations

import time

from grpo_run.runtime.host_memory.cgroup_kills import read_cgroup_kills
from grpo_run.runtime.record.history import History
from grpo_run.watchdog.host_memory.pressure import shortage
from grpo_run.watchdog.host_memory.sample import HostSample, describe_use

RECENT_SECONDS = 60.0
"""The last sample must be at most so much older than the last event of the journal."""


def suspected(sample: HostSample | None, history: History) -> str | None:
    """Return a sentence if the kernel has ended the last supervisor, or may have; else None.

    Args:
        sample: the last one of that supervisor.
        history: before the event of this launch.
    """
    if sample is None or history.supervisors == 0 or history.exit_code is not None:
        return None
    if abs((history.time.last or 0.0) - sample.at) > RECENT_SECONDS:
        return None
    killed, short = _killed_since(sample), shortage(sample)
    if killed == 0 or (killed is None and short is None):
        return None
    before = sample.supervisor_kills
    if killed is None or before is None:
        how = "ended without a record, probably killed by the kernel because memory was full"
    elif sample.kills_at_end is not None:
        how = (
            "was killed by the kernel because memory was full: as it ended, the counter of killed processes of"
            f" {before.folder} rose from {before.count} to {sample.kills_at_end}"
        )
    else:
        how = (
            f"ended without a record. The kernel has killed {killed} processes of {before.folder} since, for lack of memory;"
            " whether the supervisor was one of them cannot be told"
        )
    together = (
        " memory.oom.group=1 makes the kernel end all of its processes together."
        if sample.kills_whole_group
        else ""
    )
    return f"the last supervisor of this run {how}. {_state(sample, short)}.{together}"


def _state(sample: HostSample, short: str | None) -> str:
    """What was in use at the last sample, as a sentence without a full stop."""
    at = time.strftime("%H:%M:%S", time.localtime(sample.at))
    nearest = sample.nearest
    state = "memory was in use"
    if short is not None:
        state = short.replace(" is in use", " was in use").replace(" have waited ", " had waited ")
    elif nearest is not None:
        state = f"{nearest.fraction:.0%} of {nearest.name} was in use"
    use = describe_use(sample, nearest)
    return f"At {at}, {state}{f' ({use})' if use else ''}"


def _killed_since(sample: HostSample) -> int | None:
    """How many processes of the supervisor's cgroup the kernel has killed since the sample; None if that is not known."""
    before = sample.supervisor_kills
    if before is None:
        return None
    if sample.kills_at_end is not None:
        return max(0, sample.kills_at_end - before.count)
    now = read_cgroup_kills(before.folder)
    if now is None or now.identity != before.identity:
        return None
    return max(0, now.count - before.count)
