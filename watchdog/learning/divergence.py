"""Guard: the policy is too far from the reference model, by the KL divergence that the trainer measures.

Pure; called by `judging.py`. There are no observations without a reference model (`beta` 0).
"""

from __future__ import annotations

from grpo_run.watchdog.learning.alarm import Alarm
from grpo_run.watchdog.learning.observations import Series
from grpo_run.watchdog.learning.rules import Guard

LIMIT_NATS = 10.0
"""Per token. Published GRPO runs stay below 1; at 10 a usual token of the policy has a probability of e-10 or so in the
reference model."""
STEPS = 3
"""Steps in a row; the estimator (k3) has rare large values."""


def find(series: Series, limit: float | None) -> Alarm | None:
    """Return an alarm if the divergence was above the limit in each of the last `STEPS` steps.

    Args:
        series: mean KL divergence in nats per token.
        limit: the largest allowed; None for `LIMIT_NATS`.
    """
    bound = limit if limit is not None else LIMIT_NATS
    last = series[-STEPS:]
    if len(last) < STEPS or any(one.value <= bound for one in last):
        return None
    return Alarm(
        guard=Guard.kl,
        step=last[-1].step,
        onset=last[0].step,
        sentence=f"The KL divergence from the reference model has been above {bound:g} since step {last[0].step}:"
        f" {last[-1].value:.3g} nats per token.",
    )
