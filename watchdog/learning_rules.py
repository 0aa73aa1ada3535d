"""The learning guards by name, their limits, and the response to each.

`Rules` is part of the run's configuration; `runtime/launch/guard_options.py` parses `--guard` into it. The
guards themselves are in `runtime/features/learning_guards/`. Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class LearningGuard(str, Enum):
    """What is guarded. The values appear on the command line, in the journal and as metric labels."""

    nonfinite = "nonfinite"
    zero_variance = "zero-variance"
    kl = "kl"
    entropy = "entropy"
    reward = "reward"
    capped = "capped"

    def __str__(self) -> str:
        return self.value


class GuardResponse(str, Enum):
    """What follows when a guard trips."""

    off = "off"
    warn = "warn"
    stop = "stop"
    roll_back = "roll-back"

    def __str__(self) -> str:
        return self.value

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
    }
)
"""What the limit of a guard is, for those that have one."""
FRACTIONS = frozenset({LearningGuard.reward, LearningGuard.capped})
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
