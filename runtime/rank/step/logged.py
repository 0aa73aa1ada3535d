"""What a call logs of its steps: on the board for the metrics, and in the journal for `status`, plots and reports.

Called by `runtime/rank/hooks/callback.py` with what a Trainer logs and by `runtime/rank/loops/run.py` with what a script logs. Names that are not
listed are ignored, so that a call can pass on everything it logs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.rank.session import Session

LOGGED_METRICS = {
    "reward": ("reward", "rewards/mean"),
    "completion_length": ("completions/mean_length", "completion_length"),
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "learning_rate": ("learning_rate", "lr"),
}
"""Fields of the board slot, and the names under which TRL and scripts log them."""


def known_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that have a field, by the field's name."""
    found: dict[str, float] = {}
    for field, names in LOGGED_METRICS.items():
        for name in names:
            value = logs.get(name)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                found[field] = float(value)
                break
    return found


def publish_metrics(
    session: Session, metrics: Mapping[str, float], *, step: int, train_call: int, journaled: bool = True
) -> None:
    """Publish metrics on the board; rank 0 also journals them.

    Args:
        metrics: result of `known_metrics`.
        step: the step that they are of, counted from 1.
        journaled: whether they are of one step.
    """
    for field, value in metrics.items():
        setattr(session.slot, field, value)
    if metrics and not math.isnan(metrics.get("reward", 0.0)):
        session.slot.publish()
    if metrics and session.is_main and journaled:
        session.journal.write("step_logged", rank=0, step=step, train_call=train_call, **metrics)
