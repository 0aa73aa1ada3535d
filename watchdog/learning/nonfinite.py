"""Guard: a loss or a gradient that is NaN or infinite. Pure; called by `judging.py`."""

from __future__ import annotations

from grpo_run.watchdog.learning.alarm import Alarm
from grpo_run.watchdog.learning.observations import Series
from grpo_run.watchdog.learning.rules import Guard


def find(series: Series, step: int) -> Alarm | None:
    """Return an alarm if the step was not finite and the step before it was.

    Args:
        series: the steps that were not finite.
        step: that has just been done.
    """
    if not series or series[-1].step != step or (len(series) > 1 and series[-2].step == step - 1):
        return None
    return Alarm(
        guard=Guard.nonfinite,
        step=step,
        onset=step,
        sentence=f"The loss or the gradient of step {step} is not finite.",
    )
