"""What a call logs of its steps: on the board for the metrics, and in the journal for `status` and
reports.

Called by `runtime/rank/hooks/_callback.py` with what a Trainer logs and by `runtime/rank/loops/run.py` with
what a script logs. Names that `watchdog/rank_metrics.py` does not list are ignored, so that a call can pass
on everything it logs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from grpo_run.runtime.history.events import step_logged
from grpo_run.runtime.history.totals import MOST_FUNCTIONS, OTHER
from grpo_run.runtime.rank.session import Session
from grpo_run.watchdog.rank_metrics import LOGGED

PREFIX = "train/"
"""Under which many scripts log what is not of an evaluation."""
CLIPPED = ("low_mean", "high_mean", "low_min", "high_max")
_REWARD_FUNCTION = re.compile(rf"(?:{PREFIX})?rewards/(.+)/(mean|std)")
"""TRL's names of what it logs of each reward function."""


def known_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers that the table lists, by field; also those in tensors and arrays of one element."""
    found: dict[str, float] = {}
    for metric in LOGGED:
        for name in metric.logged_as:
            value = _number(logs.get(name, logs.get(f"{PREFIX}{name}")))
            if value is not None:
                found[metric.field] = value
                break
    return found


def logged_rewards(logs: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return `mean` and `std` of each reward function, as far as they are logged as finite numbers.

    Of more than `MOST_FUNCTIONS` functions, the rest in alphabetical order share the entry `other`, with the
    means of their values.
    """
    functions: dict[str, dict[str, float]] = {}
    for name, logged in logs.items():
        found = _REWARD_FUNCTION.fullmatch(str(name))
        value = _number(logged) if found else None
        if found and value is not None and math.isfinite(value):
            functions.setdefault(found[1], {})[found[2]] = value
    listed = sorted(functions)
    kept = {name: functions[name] for name in listed[:MOST_FUNCTIONS]}
    rest = [functions[name] for name in listed[MOST_FUNCTIONS:]]
    if rest:
        kept[OTHER] = {
            key: fmean(own) for key in ("mean", "std") if (own := [one[key] for one in rest if key in one])
        }
    return kept


def logged_clipping(logs: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of tokens that were clipped, by what TRL puts after `clip_ratio/`, but for the share
    of all, which the table lists; as far as they are finite numbers.
    """
    found = {name: _number(logs.get(f"clip_ratio/{name}")) for name in CLIPPED}
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def _number(value: Any) -> float | None:
    if value is None or isinstance(value, (bool, str)):
        return None
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError, RuntimeError):  # a histogram, or a tensor of several elements
        return None


def publish_metrics(
    session: Session,
    metrics: Mapping[str, float],
    logs: Mapping[str, Any],
    *,
    step: int,
    train_call: int,
    journaled: bool = True,
) -> None:
    """Publish metrics on the board; rank 0 also journals them, and what is logged of each reward function.

    Args:
        metrics: result of `known_metrics`.
        logs: everything that was logged.
        step: the step that they are of, counted from 1.
        journaled: whether they are of one step.
    """
    if metrics:
        session.slot.log(metrics)
    if metrics and not math.isnan(metrics.get("reward", 0.0)):
        session.slot.publish()
    if metrics and session.is_main and journaled:
        event = step_logged(
            metrics, rank=0, step=step, train_call=train_call, reward_functions=logged_rewards(logs),
            clipped=logged_clipping(logs),
        )  # fmt: skip
        session.journal.write(event)
