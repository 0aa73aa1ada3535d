"""Guard: all groups of many consecutive rollouts have equal rewards, so there is no learning signal.

Pure; called by `judging.py`.
"""

from __future__ import annotations

from grpo_run.watchdog.learning.alarm import Alarm
from grpo_run.watchdog.learning.observations import Series
from grpo_run.watchdog.learning.rules import Guard

ROLLOUTS = 30
"""Without a limit of the user's. With a tenth of the groups informative, 30 rollouts of one group in a row without any
happen once in 24 runs; with more groups in a rollout, hardly ever."""


def find(series: Series, limit: float | None) -> Alarm | None:
    """Return an alarm if no group of the last rollouts had two different rewards.

    Args:
        series: share of the groups with equal rewards, one value per rollout.
        limit: how many rollouts in a row; None for `ROLLOUTS`.
    """
    rollouts = max(1, round(limit)) if limit is not None else ROLLOUTS
    last = series[-rollouts:]
    if len(last) < rollouts or any(one.value < 1.0 for one in last):
        return None
    return Alarm(
        guard=Guard.zero_variance,
        step=last[-1].step,
        onset=last[0].step,
        sentence=f"All groups of the last {rollouts} rollouts, since step {last[0].step}, have equal rewards: the rewards"
        " teach nothing.",
    )
