"""The option of sample masking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.option import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class MaskingSettings:
    """When the rewards of a rollout are computed once more.

    Raises:
        ConfigError: a value is out of range.
    """

    NAME: ClassVar[str] = "masking"
    repeat_rewards_above: float = option(
        0.5, "--repeat-rewards-above", group=OptionGroup.training, metavar="SHARE", kind=float,
        changes_training=True,
        help="compute the rewards of a rollout once more if more than this share of its samples has no valid"
        " reward; 1 for never",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if not 0 <= self.repeat_rewards_above <= 1:
            raise ConfigError(
                f"--repeat-rewards-above {self.repeat_rewards_above:g}: must be a share from 0 to 1 (never)"
            )


SETTINGS = MaskingSettings
