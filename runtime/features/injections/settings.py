"""The options of injections, and what a rank is told. Plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import pydantic

from grpo_run.runtime.features.injections._injection import GRAMMAR, Injection, check, help_text, parse_all
from grpo_run.runtime.launch.option import OptionGroup, option


def _canonical(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(str, parse_all(texts)))


@dataclass(frozen=True, kw_only=True)
class InjectionSettings:
    """The faults of a run."""

    NAME: ClassVar[str] = "injections"
    inject: tuple[str, ...] = option(
        (), "--inject", group=OptionGroup.injection, metavar=GRAMMAR.partition("[")[0], repeated=True,
        read=_canonical, listed=help_text,
        help=f"inject one fault into one rank, once in the run: {GRAMMAR}; may be repeated; `--inject help`"
        " lists the kinds",
    )  # fmt: skip
    """Canonical texts."""
    strict: bool = option(
        False, "--strict-faults", group=OptionGroup.injection,
        help="end with exit code 93 if an injected fault never happened (default: say so at the end)",
    )  # fmt: skip
    """Whether a run in which an injected fault never happened has failed."""

    def check_ranks(self, ranks: int) -> None:
        """Check that every fault can happen in a run of so many ranks.

        Raises:
            ConfigError: one cannot.
        """
        check(self.injections, ranks)

    @property
    def injections(self) -> tuple[Injection, ...]:
        """The faults."""
        return parse_all(self.inject)


SETTINGS = InjectionSettings


class RankInjections(pydantic.BaseModel):
    """What a rank is told.

    Attributes:
        fired: injections that have fired in earlier attempts, as canonical text.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    fired: tuple[str, ...] = ()
