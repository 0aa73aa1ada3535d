"""Deadlines of phases: learned from the durations that the run has shown, within configured bounds.

For hangs that collectives cannot prove. The formula and its constants were chosen by simulation
(`benchmarks/false_alarms.py`, docs/watchdog.md). Called by `overdue.py`. Pure; measures and terminates
nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Durations


class Occurrence(str, Enum):
    """Whether the rank has finished this phase before in this attempt; the first one fills caches."""

    first = "first"
    later = "later"


USUAL_FRACTION = 0.99
"""Quantile that represents a long but usual occurrence; rare outliers (one in a thousand) are above it."""
SMALL_SAMPLE = 20
"""Below this number of occurrences the tail is uncertain, and the margin grows with the inverse root of the
number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeadlineSettings:
    """Bounds and margins of learned deadlines, in seconds or as factors of observed durations.

    Raises:
        ValueError: a value is not a finite positive number, or two values contradict each other.
    """

    floor_seconds: float = 8.0
    """Minimum for later occurrences, so that a short pause of the machine (swapping, a VM snapshot) is not a
    hang."""
    ceiling_seconds: float = 3600.0
    """Limit of the margin for outliers; a longer deadline requires durations that were observed
    (`factor_seen`)."""
    first_seconds: float = 1800.0
    """For the first occurrence of a phase without any observation."""
    startup_seconds: float = 3600.0
    """The same for start-up, which may download a model."""
    evaluation_seconds: float = 3600.0
    """The same for an evaluation, which may process a whole data set."""
    first_floor_seconds: float = 60.0
    """Minimum for first occurrences."""
    exit_seconds: float = 60.0
    """After the script's last line: an inactive process is hung after this time."""
    exit_connected_seconds: float = 300.0
    """The same while something lives that the process may wait for: a process that it started, or one at the
    other end of a connection."""
    factor_seen: float = 5.0
    """Multiple of the longest observed duration."""
    factor_unseen: float = 30.0
    """Multiple of a usual long duration, for outliers that have not been observed."""
    factor_first: float = 10.0
    """Multiple of an earlier first occurrence, for another first occurrence."""
    factor_again: float = 1.5
    """Multiple of the first occurrence, for later ones: a recompilation or a reconnection takes as long
    again."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name} must be a finite number above 0, not {value}")
            if field.name.startswith("factor_") and value < 1:
                raise ValueError(f"{field.name} must be at least 1, not {value}")
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
        """Return the deadline of a phase without any observation."""
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
    """Return how long a rank may be in `phase` without progress.

    A later occurrence gets max(floor, seen, min(unseen, ceiling)). `seen` is `factor_seen` times the longest
    duration or `factor_again` times the first; `unseen` is `factor_unseen` times the 99th percentile, more
    while the sample is small. As the run proceeds and outliers are observed, `seen` dominates. The ceiling
    limits only the margin for unseen outliers, so a duration that was observed is never a hang. `idle` is the
    script's own time between two `train()` calls, about which nothing can be learned: its deadline is the
    ceiling.

    Args:
        durations: observations of the phase over all ranks and attempts; None without any.
        occurrence: whether this rank has finished the phase before in this attempt.
    """
    if phase is Phase.idle:
        return settings.ceiling_seconds
    if durations is None or not (durations.count or durations.first_seconds > 0):
        return settings.unlearned_seconds(phase)
    later = _later_seconds(durations, settings)
    if occurrence is Occurrence.later:
        return later
    first = settings.factor_first * durations.first_seconds
    if first <= 0:  # there are counts, but the first occurrence of every attempt was lost
        first = settings.unlearned_seconds(phase)
    seen = settings.factor_again * durations.first_seconds
    bound = max(settings.first_floor_seconds, seen, min(first, settings.ceiling_seconds))
    # without later occurrences, a first one is compared with first ones only
    return max(bound, later) if durations.count else bound


def _later_seconds(durations: Durations, settings: DeadlineSettings) -> float:
    number = durations.count
    longest = durations.longest_seconds
    seen = max(settings.factor_seen * longest, settings.factor_again * durations.first_seconds)
    usual = min(durations.quantile(USUAL_FRACTION), longest)
    floor = settings.floor_seconds
    if not number:  # only first occurrences were observed: treat the longest of them as one later occurrence
        number, usual = 1, durations.first_seconds
        floor = settings.first_floor_seconds
    unseen = settings.factor_unseen * usual * math.sqrt(max(1.0, SMALL_SAMPLE / number))
    return max(floor, seen, min(unseen, settings.ceiling_seconds))
