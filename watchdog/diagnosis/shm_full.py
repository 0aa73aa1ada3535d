"""Diagnosis of ranks that were killed because /dev/shm was full: cause `shm_full`, with the numbers.

A write to a page of a mapped file that has no space any more raises SIGBUS, which no code of the rank can handle; what raises
an exception instead is recognized by its text (`watchdog.out_of_memory`). Called by the incident investigation. Pure.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import diagnose_exits
from grpo_run.watchdog.duration_text import duration_text
from grpo_run.watchdog.host_memory.kills import KernelKills
from grpo_run.watchdog.host_memory.sample import size_text
from grpo_run.watchdog.observation import Exit, Slot
from grpo_run.watchdog.verdict import Verdict

FULL_FRACTION = 0.98
"""A file system with less than 2 % free counts as full: the write that failed may have asked for more than a page."""
ADVICE = (
    "Give /dev/shm more space (docker's --shm-size, an emptyDir with medium Memory in Kubernetes), or use less of it: fewer"
    " data-loader workers, or --snapshot-dir off."
)


def diagnose_shm_full(
    exits: Sequence[Exit],
    slots: Mapping[int, Slot | None],
    kills: KernelKills,
    *,
    best_position: tuple[int, int],
) -> Verdict | None:
    """Return the verdict if ranks were killed by SIGBUS while /dev/shm was full; else None. Arguments as `diagnose_host_oom`."""
    sample = kills.sample
    killed = [exit for exit in exits if exit.signal == signal.SIGBUS]
    if sample is None or not killed or not sample.shm_total_bytes:
        return None
    if sample.shm_used_bytes < FULL_FRACTION * sample.shm_total_bytes:
        return None
    base = diagnose_exits(killed, slots, best_position=best_position)
    used = f"{size_text(sample.shm_used_bytes)} of {size_text(sample.shm_total_bytes)}"
    return replace(
        base,
        cause=Cause.shm_full,
        sentence=f"{base.sentence.rstrip('.')}, because /dev/shm was full: {used} were in use"
        f" {duration_text(kills.sample_age_seconds)} before.",
        signature=f"shm_full:rank{base.culprit}:step{base.step}",
        advice=(ADVICE,),
    )
