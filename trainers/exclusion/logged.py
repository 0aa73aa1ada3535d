"""What TRL logs of a rollout, kept correct when samples are excluded or rewards are computed again.

Called by `attach.py`.
"""

from __future__ import annotations

import math
from typing import Any

from grpo_run.trainers.exclusion.selection import Selection
from grpo_run.trainers.upstream import trainer_names
from grpo_run.trainers.upstream.rollout_names import PENDING_TABLES, ZERO_STD


class PendingTables:
    """A copy of what reward functions have logged so far of the rollout that is being scored."""

    def __init__(self, trainer: Any) -> None:
        self._tables = [
            (table, {key: list(values) for key, values in table.items()})
            for name in PENDING_TABLES
            if (table := getattr(trainer, name, None)) is not None
        ]

    def restore(self) -> None:
        """Put the copy back, so that rewards which are computed again are not logged twice."""
        for table, kept in self._tables:
            table.clear()
            for key, values in kept.items():
                table[key] = list(values)


def correct_zero_std(trainer: Any, selection: Selection, *, training: bool) -> None:
    """Take groups without samples out of the share of groups in which all rewards are equal.

    TRL divides by all groups. The value is left out of the average of the log line if there is no group left.
    """
    values = getattr(trainer, trainer_names.METRICS)["train" if training else "eval"].get(ZERO_STD)
    if not values or not selection.groups:
        return
    left = selection.group_count - len(selection.groups)
    values[-1] = min(1.0, values[-1] * selection.group_count / left) if left else math.nan
