"""How often to take a snapshot: often enough to lose little, rarely enough to cost little. Pure.

Young's first-order optimum (CACM 17(9), 1974): with a snapshot that blocks for C seconds and a failure every M seconds
on average, the time between snapshots that wastes least is sqrt(2 C M). Daly (FGCS 22(3), 2006) shows it to be good
for C well below M, which a copy in memory always is; his higher-order terms would change nothing here. Asked by
the guard after each snapshot; M comes from the run's own history (`mean_time_between_failures`).
"""

from __future__ import annotations

import math

PRIOR_FAILURE_SECONDS = 4 * 3600.0
"""Before a run has shown otherwise: one failure in four hours, as often as the 16,384 GPUs of Llama 3's pre-training
failed (arXiv:2407.21783, section 3.3.4: 466 interruptions in 54 days are one in 2.8 hours). Pessimistic for 64."""

MOST_STEPS = 1_000_000
"""More than any run has: a measurement of next to no time a step must not overflow."""


def mean_time_between_failures(elapsed_seconds: float, failures: int) -> float:
    """Seconds between failures: what the run has shown, with one prior observation.

    Args:
        elapsed_seconds: how long the run has been going, all attempts together.
        failures: how often it was interrupted.
    """
    return (elapsed_seconds + PRIOR_FAILURE_SECONDS) / (failures + 1)


def steps_between_snapshots(cost_seconds: float, failure_seconds: float, step_seconds: float) -> int:
    """The optimum in whole steps, at least 1 and at most `MOST_STEPS`.

    Args:
        cost_seconds: how long training is blocked for one snapshot.
        failure_seconds: mean time between failures.
        step_seconds: length of a step.
    """
    if not step_seconds > 0:
        return 1
    optimum_seconds = math.sqrt(2 * max(0.0, cost_seconds) * max(0.0, failure_seconds))
    return max(1, round(min(optimum_seconds / step_seconds, MOST_STEPS)))
