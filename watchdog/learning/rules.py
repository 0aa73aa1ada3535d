"""The learning guards by name, what each one does when it trips, and the limits that apply.

`Rules` is part of the run's configuration; `trainers/learning/options.py` parses `--guard` into it. Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType


class Guard(str, Enum):
    """What is guarded. The values appear on the command line, in the journal and as metric labels."""

    nonfinite = "nonfinite"
    zero_variance = "zero-variance"
    kl = "kl"
    entropy = "entropy"
    reward = "reward"
    capped = "capped"

    def __str__(self) -> str:
        return self.value


class Response(str, Enum):
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
        return self in (Response.stop, Response.roll_back)


DEFAULT_RESPONSES: Mapping[Guard, Response] = MappingProxyType(
    {guard: Response.roll_back if guard is Guard.nonfinite else Response.warn for guard in Guard}
)
"""Weights that are not finite are lost for certain; every other alarm may be what the user wants."""
LIMITS: Mapping[Guard, str] = MappingProxyType(
    {
        Guard.zero_variance: "rollouts in a row",
        Guard.kl: "largest mean KL divergence in nats",
        Guard.entropy: "smallest mean entropy in nats",
        Guard.reward: "share of the reward that may be lost",
        Guard.capped: "largest share of capped completions",
    }
)
"""What the limit of a guard is, for those that have one."""
FRACTIONS = frozenset({Guard.reward, Guard.capped})
"""Guards whose limit is a share, between 0 and 1."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What each guard does, and its limit where the user has set one. A guard that is absent has its default."""

    responses: Mapping[Guard, Response] = field(default_factory=dict)
    limits: Mapping[Guard, float] = field(default_factory=dict)

    def response(self, guard: Guard) -> Response:
        """Return what follows when the guard trips."""
        return self.responses.get(guard, DEFAULT_RESPONSES[guard])
