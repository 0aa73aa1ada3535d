"""The option of replicas, and what a rank is told of earlier differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.option import OptionGroup, option


@dataclass(frozen=True, kw_only=True)
class ReplicaSettings:
    """How often what ranks hold in common is compared.

    Raises:
        ConfigError: the number is negative.
    """

    NAME: ClassVar[str] = "replicas"
    every: int = option(
        50, "--compare-every", group=OptionGroup.training, metavar="N", kind=int,
        help=(
            "compare digests of the parameters and moments that ranks hold in common every N steps; 0 for"
            " never"
        ),
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ConfigError(f"--compare-every must be 0 (never) or more, not {self.every}")


class Difference(pydantic.BaseModel, frozen=True):
    """Ranks held different values.

    Attributes:
        train_call: in which they did.
        step: after which they were compared.
        agreed: the last step after which they were equal; 0 for none.
        count: of tensors that differ.
        name: of the first of them.
        position: of the element of that tensor in which ranks differ most.
        bits: of each rank's value of the element.
        ranks: that differ from the majority; empty if there is none.
    """

    train_call: int
    step: int
    agreed: int
    count: int
    name: str
    position: int
    bits: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def place(self) -> tuple[object, ...]:
        """What an exact repetition gives again, if the script makes the difference."""
        return self.train_call, self.step, self.count, self.name, self.position, self.bits


class RankReplicas(pydantic.BaseModel, frozen=True):
    """What a rank is told of the run so far.

    Attributes:
        differences: all that were found.
        open: those whose rank is not known.
    """

    differences: tuple[Difference, ...] = ()
    open: tuple[Difference, ...] = ()


SETTINGS = ReplicaSettings
