"""The points at which features take part in a rank.

For each trainer that generates, `rollouts` once before training. What it adds is called around every rollout
by `hooks/_rollout_hooks.py`, which has the order of all calls. Plain data, and methods that do nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream.patches import Handler

RowReasons = Callable[[], Sequence[str] | None]
"""Says why each row of this rank's last rollout leaves, "" for one that stays; None if no row of any rank
can.
"""


class Failed(float):
    """A reward that could not be computed, made by `failed`.

    TRL sees minus infinity, which survives its conversion to a tensor and its gather over the ranks.
    """

    reason: str


def failed(reason: str) -> Failed:
    """Return the reward of a sample for which a function has failed: the row leaves for this reason."""
    made = Failed(-math.inf)
    made.reason = reason
    return made


@dataclass(kw_only=True)
class RolloutPoints:
    """What features add to the rollouts of one trainer. Of each list, the first handler is the outermost.

    Attributes:
        inputs: called around everything that is done for a rollout; they get the rows of the data set, and
            may pass on others.
        scoring: called around TRL's scoring of a rollout, inside its phase; they get the same rows, and
            what they return is the rollout that is trained on.
        rewards: called around the computation of rewards, outside its phase; they get what it is called
            with, and may return another table.
        leaving: why rows are left out of baseline and loss. The words are labels in the metrics.
    """

    inputs: list[Handler] = field(default_factory=list)
    scoring: list[Handler] = field(default_factory=list)
    rewards: list[Handler] = field(default_factory=list)
    leaving: list[RowReasons] = field(default_factory=list)

    def row_reasons(self) -> Sequence[str] | None:
        """Return the first reason of each row."""
        found = [reasons for one in self.leaving if (reasons := one()) is not None]
        return [next(filter(None, row), "") for row in zip(*found, strict=True)] if found else None


class RankFeature:
    """A feature in one rank. It overrides the points at which it takes part; the others do nothing."""

    name: ClassVar[str]
    """Under which its settings are in `RankSettings.features`."""

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Add to the rollouts of a trainer that is about to train.

        Args:
            train_call: number of the call in the run.
        """
