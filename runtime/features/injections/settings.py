"""What a rank is told of injections. Plain data, written by the supervisor for each attempt."""

from __future__ import annotations

import pydantic

NAME = "injections"
"""Under which the settings are in `RankSettings.features`."""


class RankInjections(pydantic.BaseModel):
    """Settings of one rank.

    Attributes:
        fired: injections that have fired in earlier attempts, as canonical text.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    fired: tuple[str, ...] = ()
