"""An order to use fresh seeds: from a step on, ranks draw other random numbers than in earlier attempts.

Decided by the recovery policy, kept with the faults in the run's history, carried to the ranks by `RankSettings`, and obeyed by `grpo_run.trainers.learning`. Plain data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_run.runtime.continuity.recovery import Recovery


@dataclass(frozen=True, kw_only=True)
class FreshSeeds:
    """New seeds for a `train()` call, from a step on.

    Attributes:
        number: of the order in the run, from 1. A checkpoint records which orders its state has obeyed.
        train_call: the number of the call.
        step: the first optimizer step, counted from 1.
    """

    number: int
    train_call: int
    step: int


def orders_of(recoveries: Sequence[Recovery]) -> tuple[FreshSeeds, ...]:
    """Return the orders of a run, oldest first."""
    return tuple(
        FreshSeeds(number=number, train_call=recovery.train_call, step=recovery.fresh_from)
        for number, recovery in enumerate(recoveries, start=1)
        if recovery.fresh_from is not None
    )
