"""The closed set of causes of a failure.

A cause is a metric label, a journal field and the title of a report, so the set is closed: a failure that
cannot be classified is `unknown`. Does not decide which cause applies (`watchdog.diagnosis`).
"""

from __future__ import annotations

from enum import Enum


class Cause(str, Enum):
    """Why a run was interrupted. The value is written to journals and metric labels."""

    exception = "exception"
    signal = "signal"
    startup_failure = "startup_failure"
    collective_mismatch = "collective_mismatch"
    collective_missing_rank = "collective_missing_rank"
    rank_exited_early = "rank_exited_early"
    slow_rank = "slow_rank"
    generation_stall = "generation_stall"
    reward_stall = "reward_stall"
    data_stall = "data_stall"
    checkpoint_stall = "checkpoint_stall"
    interpreter_stuck = "interpreter_stuck"
    gpu_oom = "gpu_oom"
    host_oom = "host_oom"
    shm_full = "shm_full"
    disk_full = "disk_full"
    checkpoint_corrupt = "checkpoint_corrupt"
    nonfinite = "nonfinite"
    learning_collapse = "learning_collapse"
    no_progress = "no_progress"
    preempted = "preempted"
    node_lost = "node_lost"
    unknown = "unknown"

    def __str__(self) -> str:
        return self.value
