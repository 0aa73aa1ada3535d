"""Diagnosis of ranks killed by the kernel's OOM killer: cause `host_oom`, with the figures.

A bare SIGKILL proves nothing: only a rise of the kernel's own counter does (`watchdog/memory/host_kills.py`).
Called by `fault.py` before other exits are diagnosed. Pure.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import diagnose_exits
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.memory.host_sample import HostSample, describe_use
from grpo_run.watchdog.observation import Exit, RankError, Slot
from grpo_run.watchdog.text import duration_text, rank_names, size_text
from grpo_run.watchdog.verdict import Verdict

KILLED_HELPER = re.compile(
    r"killed by signal: Killed|terminated abruptly|(?:exit ?code|exited with(?: code)?|returncode)["
    r" :=]*-9\b|\bSIGKILL\b",
    re.IGNORECASE,
)
"""How libraries report that a process which they have started was killed: torch's data loader,
`concurrent.futures`, `subprocess`, joblib.
"""
ADVICE = (
    "Give the job more memory, or use less on the host: fewer data-loader workers, less offloading to the"
    " CPU, and --snapshot-dir off if snapshots take much of it."
)


CLEARLY_MORE = 1.25
"""How many times the memory of another rank one must have had to be named alone. Ranks that train alike
differ by less."""


def diagnose_host_oom(
    exits: Sequence[Exit],
    slots: Mapping[int, Slot | None],
    kills: KernelKills,
    *,
    best_position: tuple[int, int],
) -> Verdict | None:
    """Return the verdict if the kernel has killed a rank, or a process that a failed rank needed; else None.

    Args:
        exits: the failed ranks.
        slots: last reading of every local rank's slot.
        kills: what the counters show.
        best_position: as in `diagnose_exits`.
    """
    killed = [exit for exit in exits if exit.signal == signal.SIGKILL and exit.rank in kills.ranks]
    if killed:
        killed = _largest(killed, kills.sample)
        base = diagnose_exits(killed, slots, best_position=best_position)
        ranks = tuple(sorted(exit.rank for exit in killed))
        _, _, where = base.sentence.rstrip(".").partition(" was killed by SIGKILL")
        verb = "was" if len(ranks) == 1 else "were"
        what = f"{rank_names(ranks, capitalize=True)} {verb} killed by the kernel"
        waiters = tuple(rank for rank in base.waiters if rank not in ranks)
        return _with_numbers(replace(base, culprits=ranks, waiters=waiters), f"{what}{where}", kills)
    helped = [exit for exit in exits if exit.error is not None and _reports_killed_helper(exit.error)]
    if kills.helper_killed and helped:
        base = diagnose_exits(helped, slots, best_position=best_position)
        what = (
            f"The kernel killed a process that rank {base.culprit} had started, which then raised"
            f" {_error_type(helped, base)}"
        )
        return _with_numbers(base, what, kills)
    return None


def _largest(killed: Sequence[Exit], sample: HostSample | None) -> list[Exit]:
    """Return the one that had taken most of the memory, or all between which the sample cannot tell: before
    the memory of the first is free, the kernel may kill a second one, whose exit is seen first.
    """
    memory = sample.ranks if sample is not None else {}
    used = {exit.rank: memory[exit.rank].anonymous_bytes if exit.rank in memory else 0 for exit in killed}
    return [exit for exit in killed if CLEARLY_MORE * used[exit.rank] >= max(used.values())]


def _with_numbers(base: Verdict, what: str, kills: KernelKills) -> Verdict:
    counted = f"The kernel's counter of killed processes rose from {kills.before} to {kills.now}."
    numbers = f" {_numbers(kills.sample, kills)}" if kills.sample is not None else ""
    return replace(
        base,
        cause=Cause.host_oom,
        sentence=f"{what}, because memory was full.{numbers} {counted}",
        signature=f"host_oom:rank{','.join(map(str, base.culprits))}:step{base.step}",
        deterministic=False,
        starting=False,
        advice=(ADVICE,),
    )


def _numbers(sample: HostSample, kills: KernelKills) -> str:
    limit = kills.reached or sample.nearest
    use = describe_use(sample, limit)
    users = f" Large users then: {use}." if use else ""
    before = f"{duration_text(kills.sample_age_seconds)} before"
    if limit is None:
        return users.strip()
    used = f"{size_text(limit.working_set_bytes)} of {size_text(limit.limit_bytes)}"
    return f"{limit.name[0].upper()}{limit.name[1:]} had {used} in use {before}.{users}"


def _reports_killed_helper(error: RankError) -> bool:
    return bool(KILLED_HELPER.search(error.message))


def _error_type(exits: Sequence[Exit], base: Verdict) -> str:
    return next(exit.error.type for exit in exits if exit.rank == base.culprit and exit.error is not None)
