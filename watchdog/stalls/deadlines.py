"""How long a phase may be silent: learned from what the run has shown, in bounds that were set.

For hangs that the ranks' collectives cannot prove. The formula and its constants were chosen by simulation
(`benchmarks/false_alarms.py`, docs/watchdog.md). Called by `detection.py`. Pure; measures nothing and ends nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Durations


class Occurrence(str, Enum):
    """Whether the rank has ended this phase before in this attempt. The first one compiles, connects, fills caches."""

    first = "first"
    later = "later"


USUAL_FRACTION = 0.99
"""The quantile that stands for a usual long occurrence: rare outliers (one in a thousand) stay out of it."""
SMALL_SAMPLE = 20
"""Below this many occurrences the sample says little about its tail, and the margin grows as their root falls."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineSettings:
    """Bounds and margins of learned deadlines. Seconds, or factors of seconds that were seen.

    Raises:
        ValueError: a value is not a finite number, or two of them contradict each other.
    """

    floor_seconds: float = 8.0
    """No later occurrence is given less: a machine that stops for a moment (swap, a snapshot) is not hung."""
    ceiling_seconds: float = 3600.0
    """Silence that ends the margin: more is granted only to what the run has shown to need it (`factor_seen`)."""
    first_seconds: float = 1800.0
    """For the first occurrence of a phase while nothing is known of it."""
    startup_seconds: float = 3600.0
    """The same for start-up, which may download a model."""
    evaluation_seconds: float = 3600.0
    """The same for an evaluation, which may walk a whole data set."""
    first_floor_seconds: float = 60.0
    """No first occurrence is given less, however quick an earlier one was."""
    exit_seconds: float = 8.0
    """After the script's last line: a process that neither computes nor reads nor writes for this long is hung."""
    exit_connected_seconds: float = 300.0
    """The same while the process holds a connection to another machine: an upload may wait for its answer."""
    factor_seen: float = 5.0
    """Over the longest that was seen."""
    factor_unseen: float = 30.0
    """Over a usual long occurrence, for the outlier that was not seen yet."""
    factor_first: float = 10.0
    """Over an earlier first occurrence, for another first one."""
    factor_again: float = 1.5
    """Over the first occurrence, for later ones: a recompilation or a reconnection takes as long again."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be a finite number above 0, not {value}")
            if field.name.startswith("factor_") and value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}: less than what was seen")
        for low, high in (
            ("floor_seconds", "ceiling_seconds"),
            ("first_floor_seconds", "ceiling_seconds"),
            ("factor_seen", "factor_unseen"),
        ):
            if getattr(self, low) > getattr(self, high):
                raise ValueError(
                    f"{low} ({getattr(self, low):g}) must not be above {high} ({getattr(self, high):g})"
                )

    def unlearned_seconds(self, phase: Phase) -> float:
        """The deadline of a phase of which nothing is known."""
        if phase is Phase.startup:
            seconds = self.startup_seconds
        elif phase is Phase.eval:
            seconds = self.evaluation_seconds
        else:
            seconds = self.first_seconds
        return min(seconds, self.ceiling_seconds)


def deadline_seconds(
    phase: Phase, durations: Durations | None, occurrence: Occurrence, settings: DeadlineSettings
) -> float:
    """How long a rank may be in `phase` without progress.

    A later occurrence gets max(floor, shown, min(unseen, ceiling)), where `shown` is `factor_seen` times the longest or
    `factor_again` times the first, and `unseen` is `factor_unseen` times the 99th percentile, more while the sample is
    small. As the run goes on and outliers have been seen, `shown` takes over. The ceiling cuts the margin for the
    unseen only: what the run has shown is never taken for a hang. `idle` is the script's own time between two
    `train()` calls, about which nothing can be learned: it gets the ceiling.

    Args:
        durations: what is known of the phase over all ranks and attempts; None for nothing.
        occurrence: whether this rank has ended the phase before in this attempt.
    """
    if phase is Phase.idle:
        return settings.ceiling_seconds
    if durations is None or not (durations.count or durations.first_seconds > 0):
        return settings.unlearned_seconds(phase)
    later = _later_seconds(durations, settings)
    if occurrence is Occurrence.later:
        return later
    first = settings.factor_first * durations.first_seconds
    if first <= 0:  # counted, but every attempt's first was lost: nothing to go by
        first = settings.unlearned_seconds(phase)
    shown = settings.factor_again * durations.first_seconds
    bound = max(settings.first_floor_seconds, shown, min(first, settings.ceiling_seconds))
    # a lone first is measured by itself, like with like; what later ones need is known only once there were some
    return max(bound, later) if durations.count else bound


def _later_seconds(durations: Durations, settings: DeadlineSettings) -> float:
    number = durations.count
    longest = durations.longest_seconds
    shown = max(settings.factor_seen * longest, settings.factor_again * durations.first_seconds)
    usual = min(durations.quantile(USUAL_FRACTION), longest)
    floor = settings.floor_seconds
    if not number:  # the first is all there is: let it stand for one occurrence
        number, usual = 1, durations.first_seconds
        floor = settings.first_floor_seconds
    unseen = settings.factor_unseen * usual * math.sqrt(max(1.0, SMALL_SAMPLE / number))
    return max(floor, shown, min(unseen, settings.ceiling_seconds))
