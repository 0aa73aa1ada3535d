"""What a rank is told of the quarantine. Plain data, written by the supervisor for each attempt."""

from __future__ import annotations

import pydantic

from grpo_run.runtime.features.quarantine.events import QuarantinedPrompt, RolloutPosition

NAME = "quarantine"
"""Under which the settings are in `RankSettings.features`."""


class RankQuarantine(pydantic.BaseModel):
    """Settings of one rank.

    Attributes:
        prompts: those that are replaced.
        suspected: the rollout of the last fault, whose prompts the rank records; None if it happened
            elsewhere.
        file: where it records them.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    prompts: tuple[QuarantinedPrompt, ...] = ()
    suspected: RolloutPosition | None = None
    file: str = ""
