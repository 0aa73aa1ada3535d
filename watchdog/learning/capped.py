"""Guard: too many completions are ended by a limit instead of by the model.

Pure; called by `judging.py`.
"""

from __future__ import annotations

from statistics import median

from grpo_run.watchdog.learning.alarm import Alarm
from grpo_run.watchdog.learning.observations import Series
from grpo_run.watchdog.learning.rules import Guard

RISE_TO = 0.5
"""Without a limit of the user's, an alarm needs a rise from below half of this share to above it. A model that has not
learned to stop is at 1 from the first step, which its user knows."""
BEGINNING = 16
ROLLOUTS = 5


def find(series: Series, limit: float | None) -> Alarm | None:
    """Return an alarm if the share was above the limit in each of the last `ROLLOUTS` rollouts.

    Args:
        series: share of the completions that a limit ended.
        limit: the largest share allowed; None for a rise above `RISE_TO`.
    """
    last, earlier = series[-ROLLOUTS:], series[:-ROLLOUTS]
    bound = limit if limit is not None else RISE_TO
    if len(last) < ROLLOUTS or any(one.value <= bound for one in last):
        return None
    if limit is None and (
        len(earlier) < BEGINNING or median(one.value for one in earlier[-BEGINNING:]) >= bound / 2
    ):
        return None
    return Alarm(
        guard=Guard.capped,
        step=last[-1].step,
        onset=last[0].step,
        sentence=f"More than {bound:.0%} of the completions have been ended by a limit since step {last[0].step}:"
        f" {last[-1].value:.0%}.",
    )
