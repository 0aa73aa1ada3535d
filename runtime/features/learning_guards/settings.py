"""The option of the learning guards, and what a rank is told of them.

`--guard NAME=RESPONSE[:LIMIT]` says for each guard what follows when it trips, and its limit. What a rank is
told of earlier attempts is written by the supervisor. Plain data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.option import OptionGroup, option
from grpo_run.watchdog.text import TextEnum, did_you_mean


class LearningGuard(TextEnum):
    """What is guarded. The values appear on the command line, in the journal and as metric labels."""

    nonfinite = "nonfinite"
    zero_variance = "zero-variance"
    kl = "kl"
    entropy = "entropy"
    reward = "reward"
    capped = "capped"
    mismatch = "mismatch"
    tools = "tools"
    aborted = "aborted"


class GuardResponse(TextEnum):
    """What follows when a guard trips."""

    off = "off"
    warn = "warn"
    stop = "stop"
    roll_back = "roll-back"

    @property
    def ends_attempt(self) -> bool:
        """Whether the ranks end."""
        return self in (GuardResponse.stop, GuardResponse.roll_back)


DEFAULT_RESPONSES: Mapping[LearningGuard, GuardResponse] = MappingProxyType(
    {
        guard: GuardResponse.roll_back if guard is LearningGuard.nonfinite else GuardResponse.warn
        for guard in LearningGuard
    }
)
"""Weights that are not finite are lost for certain; every other alarm may be what the user wants."""
LIMITS: Mapping[LearningGuard, str] = MappingProxyType(
    {
        LearningGuard.zero_variance: "rollouts in a row",
        LearningGuard.kl: "largest mean KL divergence in nats",
        LearningGuard.entropy: "smallest mean entropy in nats",
        LearningGuard.reward: "share of the reward that may be lost",
        LearningGuard.capped: "largest share of capped completions",
        LearningGuard.mismatch: "largest mean difference between vLLM and the trainer in nats",
        LearningGuard.tools: "largest share of calls of tools that fail",
        LearningGuard.aborted: "largest share of requests to the rollout server that fail",
    }
)
"""What the limit of a guard is, for those that have one."""
FRACTIONS = frozenset(
    {LearningGuard.reward, LearningGuard.capped, LearningGuard.tools, LearningGuard.aborted}
)
"""Guards whose limit is a share, between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What each guard does, and its limit where the user has set one. A guard that is absent has its
    default.
    """

    responses: Mapping[LearningGuard, GuardResponse] = field(default_factory=dict)
    limits: Mapping[LearningGuard, float] = field(default_factory=dict)

    def response(self, guard: LearningGuard) -> GuardResponse:
        """Return what follows when the guard trips."""
        return self.responses.get(guard, DEFAULT_RESPONSES[guard])


GRAMMAR = "NAME=RESPONSE[:LIMIT]"


def parse_guards(settings: Sequence[str]) -> Rules:
    """Parse the settings of guards; a later one of the same guard wins.

    Raises:
        ConfigError: a name, a response or a limit is wrong.
    """
    responses: dict[LearningGuard, GuardResponse] = {}
    limits: dict[LearningGuard, float] = {}
    for setting in settings:
        name, separator, rest = setting.partition("=")
        if not separator:
            raise ConfigError(f"--guard {setting}: expected {GRAMMAR}")
        guard = LearningGuard(
            _known(name.strip().replace("_", "-"), [str(one) for one in LearningGuard], setting, "guard")
        )
        text, limited, limit = rest.partition(":")
        response = text.strip().replace("_", "-")
        responses[guard] = GuardResponse(
            _known(response, [str(one) for one in GuardResponse], setting, "response")
        )
        limits.pop(guard, None)
        if limited:
            limits[guard] = _limit(guard, limit, setting)
    return Rules(responses=responses, limits=limits)


def _known(word: str, known: list[str], setting: str, what: str) -> str:
    if word in known:
        return word
    raise ConfigError(f"--guard {setting}: unknown {what} {word!r}; {did_you_mean(word, known)}")


def _limit(guard: LearningGuard, text: str, setting: str) -> float:
    if guard not in LIMITS:
        raise ConfigError(f"--guard {setting}: {guard} has no limit")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(
            f"--guard {setting}: the limit is the {LIMITS[guard]}, which must be a number above 0"
        )
    if guard in FRACTIONS and value >= 1:
        raise ConfigError(f"--guard {setting}: the limit is the {LIMITS[guard]}, which must be below 1")
    if guard is LearningGuard.zero_variance and value % 1:
        raise ConfigError(
            f"--guard {setting}: the limit is the number of {LIMITS[guard]}, which must be a whole number"
        )
    return value


@dataclass(frozen=True, kw_only=True)
class LearningGuardSettings:
    """What the learning guards do."""

    NAME: ClassVar[str] = "learning_guards"
    rules: Rules = option(
        Rules, "--guard", group=OptionGroup.training, metavar=GRAMMAR, repeated=True, read=parse_guards,
        most_used=True,
        help=f"response to an alarm of a guard: {', '.join(GuardResponse)}, for {', '.join(LearningGuard)};"
        " roll-back repeats from a checkpoint before the onset, once exactly and once with fresh samples,"
        " then stops; may be repeated (default: nonfinite=roll-back, the others warn)",
    )  # fmt: skip


SETTINGS = LearningGuardSettings


class FreshSeeds(pydantic.BaseModel):
    """New seeds for a `train()` call, from a step on.

    Attributes:
        number: of the order in the run, from 1. A checkpoint records which orders its state has obeyed.
        train_call: the number of the call.
        step: the first optimizer step, counted from 1.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    number: int
    train_call: int
    step: int


class RankGuards(pydantic.BaseModel):
    """What a rank is told of earlier attempts.

    Attributes:
        fresh_seeds: orders to sample anew from a step on, oldest first.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    fresh_seeds: tuple[FreshSeeds, ...] = ()
