"""When host memory is short: from the working set and PSI.

Short memory asks for measures that harm nobody: to give back what is on disk as well, and unused caches. A
run that keeps using nearly all of its memory, or that fills it with page cache, is healthy. Pure; called by
`runtime/supervisor`.
"""

from __future__ import annotations

from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse

SHORT_FREE_FRACTION = 0.10
"""Memory is short when less of a limit is free, page cache counted as free."""
SHORT_FREE_BYTES = 32 << 30
"""And not while more than this is free: a tenth of a large machine is more than a step needs."""
LEAST_FREE_BYTES = 48 << 20
"""Memory is also short when less than this is free for each rank, and once more: a rank that exits writes to
32 MiB that it shared with the forkserver until then (measured with TRL), and so does the drain worker.
"""
SHORT_PRESSURE = 0.10
"""Share of 10 s in which every task waited for memory (PSI, `full avg10`)."""


def is_short(use: LimitUse, ranks: int) -> bool:
    """Return whether less of a limit is free than there should be.

    Args:
        ranks: number of ranks on the node.
    """
    least_bytes = max(SHORT_FREE_FRACTION * use.limit_bytes, LEAST_FREE_BYTES * (ranks + 1))
    return use.limit_bytes - use.working_set_bytes < min(least_bytes, SHORT_FREE_BYTES)


def shortage(sample: HostSample) -> str | None:
    """Return in which way memory is short, as a sentence's beginning; None if it is not."""
    short = [use for use in sample.limits if is_short(use, len(sample.ranks))]
    if short:
        use = short[0]
        return f"{use.fraction:.0%} of {use.name} is in use"
    if sample.full_pressure is not None and sample.full_pressure > SHORT_PRESSURE:
        return (
            f"the processes of {sample.cgroup} have waited for memory for {sample.full_pressure:.0%} of the"
            " last 10 s"
        )
    return None
