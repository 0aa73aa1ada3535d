"""Stragglers: ranks that take much longer than the others for their own work.

Reported, never terminated. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.durations import Durations

MIN_RATIO = 1.5
MIN_DIFFERENCE_SECONDS = 0.05
MIN_OCCURRENCES = 20
INDEPENDENT_PHASES = (Phase.generate, Phase.reward, Phase.data, Phase.optimizer, Phase.checkpoint)
"""Phases in which a rank works mostly for itself; in all others every rank is as slow as the slowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that takes much longer than the others: its median in one phase and theirs."""

    rank: int
    phase: Phase
    median_seconds: float
    others_seconds: float

    @property
    def ratio(self) -> float:
        """How many times as long as the others."""
        return self.median_seconds / self.others_seconds


def find_stragglers(durations_by_rank: Mapping[int, Mapping[PhaseKey, Durations]]) -> list[Straggler]:
    """Return ranks whose median is at least 1.5 times the median of the others; the largest difference first.

    Medians are interpolated in half-octave buckets, so a ratio near the threshold may fall on either side.
    """
    found = []
    for phase in INDEPENDENT_PHASES:
        medians = {
            rank: phases[phase].median_seconds
            for rank, phases in durations_by_rank.items()
            if phase in phases and phases[phase].count >= MIN_OCCURRENCES
        }
        for rank, own in medians.items():
            others = [seconds for other, seconds in medians.items() if other != rank]
            if not others:
                continue
            usual = median(others)
            if own >= MIN_RATIO * usual and own - usual >= MIN_DIFFERENCE_SECONDS:
                found.append(Straggler(rank=rank, phase=phase, median_seconds=own, others_seconds=usual))
    return sorted(found, key=lambda one: (one.others_seconds - one.median_seconds, one.rank))
