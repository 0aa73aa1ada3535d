"""The options of the rollout server, and what a rank is told of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import ClassVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.option import OptionGroup, option

NAME = "rollout_server"


@dataclass(frozen=True, kw_only=True)
class RolloutServerSettings:
    """The server that a run starts for its rollouts.

    Raises:
        ConfigError: a value is out of range, or the command cannot be split into words.
    """

    NAME: ClassVar[str] = NAME
    command: str = option(
        "", "--rollout-server", group=OptionGroup.run, metavar="COMMAND", most_used=True,
        help="start this inference server beside the ranks, such as 'vllm serve MODEL', watch it, and start"
        " it again when it has died; the script needs no address (default: none; a server that the script"
        " names is watched only)",
    )  # fmt: skip
    """Empty for no server."""
    restarts: int = option(
        3, "--rollout-server-restarts", group=OptionGroup.run, metavar="N", kind=int,
        help="starts of the rollout server again without a newer checkpoint, after which the run is given up",
    )  # fmt: skip
    start_seconds: float = option(
        1800.0, "--rollout-server-start-timeout", group=OptionGroup.limits, metavar="SECONDS", kind=float,
        help="time the rollout server may take until it answers its first token; compiling takes minutes",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise ConfigError(f"--rollout-server-restarts must be 0 (never) or more, not {self.restarts}")
        if not 0 < self.start_seconds < float("inf"):
            raise ConfigError(
                f"--rollout-server-start-timeout must be above 0 and finite, not {self.start_seconds:g}"
            )
        try:
            shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(f"--rollout-server {self.command}: {error}") from None


SETTINGS = RolloutServerSettings


class RankServer(pydantic.BaseModel):
    """What a rank is told of the server that the run has started.

    Attributes:
        base_url: where it answers, such as `http://127.0.0.1:41231`.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    base_url: str
