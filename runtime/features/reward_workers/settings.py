"""What a rank is told of its reward functions. Plain data, written by the supervisor for each attempt."""

from __future__ import annotations

from typing import Any

import pydantic

from grpo_run.runtime.features.reward_workers.events import MovedReward

NAME = "reward_workers"
"""Under which the settings are in `RankSettings.features`."""


class RankRewards(pydantic.BaseModel):
    """Settings of one rank, which may start workers.

    Attributes:
        moved: functions that run in workers because they have failed.
        durations: how long rewards took in earlier attempts, as JSON; None if that is not known.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    moved: tuple[MovedReward, ...] = ()
    durations: dict[str, Any] | None = None
