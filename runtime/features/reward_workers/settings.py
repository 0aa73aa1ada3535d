"""The options of reward workers, and what a rank is told. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.reward_workers.events import MovedReward
from grpo_run.runtime.launch.option import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class RewardWorkerSettings:
    """Which reward functions run in workers from the start, and how long a call may take there.

    Raises:
        ConfigError: a value is out of range.
    """

    NAME: ClassVar[str] = "reward_workers"
    workers: int = option(
        0, "--reward-workers", group=OptionGroup.training, metavar="N", kind=int,
        help="run the reward functions of each rank in N worker processes, where a hanging call is killed,"
        " and only the samples that it fails on are excluded (default: 0; a function that has"
        " failed twice at one step is moved to a worker in any case)",
    )  # fmt: skip
    """Worker processes of each rank that run its reward functions; 0 to run them in the rank."""
    timeout_seconds: float | None = option(
        None, "--reward-timeout", group=OptionGroup.training, metavar="SECONDS", kind=float,
        help="longest time of one call of a reward function in a worker (default: learned, below the hang"
        " detector's)",
    )  # fmt: skip
    """Longest time of one call of a reward function in a worker; None to learn it."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(f"--reward-workers must be 0 (none) or more, not {self.workers}")
        if self.timeout_seconds is not None and not 0 < self.timeout_seconds < float("inf"):
            raise ConfigError(f"--reward-timeout {self.timeout_seconds:g}: must be above 0 seconds")


SETTINGS = RewardWorkerSettings


class RankRewards(pydantic.BaseModel):
    """What a rank is told that may start workers.

    Attributes:
        moved: functions that run in workers because they have failed.
        durations: how long rewards took in earlier attempts, as JSON; None if that is not known.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    moved: tuple[MovedReward, ...] = ()
    durations: dict[str, Any] | None = None
