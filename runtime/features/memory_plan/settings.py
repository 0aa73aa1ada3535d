"""What a rank is told of the memory plan. Plain data, written by the supervisor for each attempt."""

from __future__ import annotations

import pydantic

from grpo_run.runtime.memory.plan import MemoryPlan

NAME = "memory_plan"
"""Under which the settings are in `RankSettings.features`."""


class RankPlan(pydantic.BaseModel):
    """Settings of one rank: the plan of the attempt."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    plan: MemoryPlan = MemoryPlan()
