"""What a rank is told of the learning guards. Plain data, written by the supervisor for each attempt."""

from __future__ import annotations

import pydantic


class FreshSeeds(pydantic.BaseModel):
    """New seeds for a `train()` call, from a step on.

    Attributes:
        number: of the order in the run, from 1. A checkpoint records which orders its state has obeyed.
        train_call: the number of the call.
        step: the first optimizer step, counted from 1.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    number: int
    train_call: int
    step: int


class RankGuards(pydantic.BaseModel):
    """Settings of one rank.

    Attributes:
        fresh_seeds: orders to sample anew from a step on, oldest first.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    fresh_seeds: tuple[FreshSeeds, ...] = ()
