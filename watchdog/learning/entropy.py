"""Guard: the policy has become deterministic, or nearly random.

Pure; called by `judging.py`.
"""

from __future__ import annotations

from itertools import islice
from statistics import median

from grpo_run.watchdog.learning.alarm import Alarm
from grpo_run.watchdog.learning.observations import Series
from grpo_run.watchdog.learning.rules import Guard

LEAST_NATS = 0.001
"""Per token. Sampling cannot explore below; vLLM was seen to fail at 0.0004. Late GRPO runs are at 0.05 and above."""
LEAST_OF_BEGINNING = 0.1
"""A model that begins with less is allowed this share of it."""
MORE_NATS = 3.0
"""Rise above the beginning: from a usual 0.5 nats to a perplexity of 33 per token."""
BEGINNING = 16
"""Observations that show where the run, or the last part of it, began."""
STEPS = 3


def find(series: Series, limit: float | None) -> Alarm | None:
    """Return an alarm if the entropy was out of bounds in each of the last `STEPS` steps.

    Args:
        series: mean entropy in nats per token.
        limit: the smallest allowed; None for `LEAST_NATS`, or less if the run began with less.
    """
    newest = series[-1].value if series else 0.0
    if (LEAST_NATS if limit is None else limit) <= newest <= MORE_NATS:
        return None  # within every bound, as nearly always
    # a value of 0 is what TRL computes if every token is masked
    last = list(islice((one for one in reversed(series) if one.value != 0), STEPS))[::-1]
    if len(last) < STEPS or last[-1].step != series[-1].step:
        return None
    first = list(islice((one for one in series if one.value != 0), BEGINNING + STEPS))
    enough = len(first) == BEGINNING + STEPS
    began = median(one.value for one in first[:BEGINNING]) if enough else None
    if limit is not None:
        least = limit
    elif began is not None:
        least = min(LEAST_NATS, LEAST_OF_BEGINNING * began)
    else:
        return None
    if all(one.value < least for one in last):
        return _alarm(last, f"below {least:g}")
    if began is not None and all(one.value > began + max(MORE_NATS, MORE_NATS * began) for one in last):
        return _alarm(last, f"far above the {began:.3g} of the beginning")
    return None


def _alarm(series: Series, where: str) -> Alarm:
    first, last = series[0], series[-1]
    return Alarm(
        guard=Guard.entropy,
        step=last.step,
        onset=first.step,
        sentence=f"The entropy of the policy has been {where} since step {first.step}: {last.value:.3g} nats per token.",
    )
