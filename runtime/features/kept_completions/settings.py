"""The option of kept completions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.option import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class KeptCompletionsSettings:
    """How many groups of each rollout are kept.

    Raises:
        ConfigError: the number is negative.
    """

    NAME: ClassVar[str] = "kept_completions"
    groups: int = option(
        0, "--log-completions", group=OptionGroup.training, metavar="N", kind=int,
        help="keep N groups of each rollout, with their rewards, in the run directory for `grpo-run serve`,"
        " at most 16 MiB for each rank",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.groups < 0:
            raise ConfigError(f"--log-completions must be 0 (none) or more, not {self.groups}")


SETTINGS = KeptCompletionsSettings
