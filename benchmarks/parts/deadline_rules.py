"""Durations of a phase as they are simulated, and the rules for its deadline that are compared. Used by
`false_alarms.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import Durations

Seconds = NDArray[np.float64]
Limit = Callable[[Durations], float]
LENGTH = 1_000_000
OUTLIER_CHANCE = 1e-3
OUTLIER_FACTOR = 20.0
BASE_MEDIANS = (0.05, 2.0, 30.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Durations of a phase in units of its median.

    `sigma` 0 means two lengths: 80 % short, 20 % five times longer.
    """

    name: str
    sigma: float

    def draw(self, median: float, length: int, generator: np.random.Generator) -> Seconds:
        """Draw durations in order; their median drifts to twice its initial value."""
        values: Seconds = np.exp((self.sigma or 0.1) * generator.standard_normal(length))
        if not self.sigma:
            values[generator.random(length) < 0.2] *= 5.0
        values[generator.random(length) < OUTLIER_CHANCE] *= OUTLIER_FACTOR
        drift = 1.0 + np.arange(length) / LENGTH
        return values * drift * median


DISTRIBUTIONS = (
    Distribution(name="log-normal 0.1", sigma=0.1),
    Distribution(name="log-normal 0.3", sigma=0.3),
    Distribution(name="log-normal 0.5", sigma=0.5),
    Distribution(name="log-normal 1.0", sigma=1.0),
    Distribution(name="two lengths", sigma=0.0),
)


SHORT_DISTRIBUTIONS = DISTRIBUTIONS[2:]
SHORT_MEDIANS = BASE_MEDIANS[1:]
"""Medians for which the floor has no effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A rule under test.

    Its deadline is never below the longest accepted duration; `alarms` relies on this.
    """

    name: str
    limit: Limit


def learned(name: str, **changes: float) -> Setting:
    """The watchdog's own rule with changed settings."""
    settings = DeadlineSettings(**changes)
    return Setting(
        name=name,
        limit=lambda durations: deadline_seconds(Phase.generate, durations, Occurrence.later, settings),
    )


def times_longest(name: str, factor: Callable[[int], float], floor: float) -> Setting:
    """A margin over the longest duration that depends only on the number of occurrences."""
    return Setting(
        name=name,
        limit=lambda durations: max(
            floor, factor(durations.count) * max(durations.longest_seconds, durations.first_seconds)
        ),
    )


def falling(number: int) -> float:
    """A factor that falls from 25 at 3,000 occurrences to 5 at 20,000, linearly on a logarithmic scale."""
    place = np.clip(np.log(max(number, 1) / 3_000) / np.log(20_000 / 3_000), 0.0, 1.0)
    return float(25.0 - 20.0 * place)


DEFAULTS = learned("**learned, the defaults**")
SETTINGS = (
    times_longest("5 x longest, no floor (NVRx's margin)", lambda number: 5.0, 0.0),
    times_longest("5 x longest, floor 8 s", lambda number: 5.0, 8.0),
    times_longest("25 x longest, floor 8 s", lambda number: 25.0, 8.0),
    times_longest("25 falling to 5 x longest, floor 8 s", falling, 8.0),
    learned("learned, unseen 20", factor_unseen=20.0),
    DEFAULTS,
    learned("learned, floor 8 s", floor_seconds=8.0),
    learned("learned, floor 30 s", floor_seconds=30.0),
    learned("learned, floor 120 s", floor_seconds=120.0),
    learned("learned, seen 3", factor_seen=3.0),
    learned("learned, seen 8", factor_seen=8.0),
    learned("learned, ceiling 7,200 s", ceiling_seconds=7200.0),
    learned("learned, no ceiling", ceiling_seconds=1e9),
)


FIXED_NAME = "10 x median of the first 20, fixed, floor 8 s"
