"""The options of tools, and what a rank is told. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.agent_tools._outages import DEFAULT_NAMES, parse_names
from grpo_run.runtime.launch.option import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class ToolSettings:
    """How long one call of a tool or an environment may take, and which of its failures are no lesson.

    Raises:
        ConfigError: the limit is negative or infinite.
    """

    NAME: ClassVar[str] = "agent_tools"
    timeout_seconds: float | None = option(
        None, "--tool-timeout", group=OptionGroup.limits, metavar="SECONDS", kind=float,
        help="time after which a call of an agent's tool or environment is ended; the call of a tool is made"
        " once more, and then its sample is left out of the loss; 0 for no limit (default: 240 for an"
        " asynchronous tool, learned for others, at least 240)",
    )  # fmt: skip
    """None to learn it; 0 for no limit."""
    infrastructure_errors: tuple[str, ...] = option(
        DEFAULT_NAMES, "--infrastructure-errors", group=OptionGroup.limits, metavar="NAMES",
        read=parse_names, changes_training=True,
        help="exceptions by which tools and environments say that what they use is away, separated by commas:"
        " the call is made once more, and then the sample is left out of the loss; none for TRL's meaning,"
        " which shows them to the model (default: ConnectionError,TimeoutError,gaierror)",
    )  # fmt: skip
    """Names of classes, with or without their modules."""

    def __post_init__(self) -> None:
        if self.timeout_seconds is not None and not 0 <= self.timeout_seconds < float("inf"):
            raise ConfigError(
                f"--tool-timeout {self.timeout_seconds:g}: must be 0 (no limit) or more seconds"
            )


SETTINGS = ToolSettings


class RankTools(pydantic.BaseModel):
    """What a rank is told.

    Attributes:
        moved: names of tools that run in workers because attempts have ended in them.
        durations: how long calls took in earlier attempts, by name, as JSON.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    moved: tuple[str, ...] = ()
    durations: dict[str, Any] = {}
