"""Ranks that are regularly late: much slower than the others in a phase in which each works for itself.

Reported and never ended. Why a rank is late is not judged. Called by `runtime/history/status.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.durations import Durations

MIN_RATIO = 1.5
MIN_DIFFERENCE_SECONDS = 0.05
MIN_OCCURRENCES = 20
INDEPENDENT_PHASES = (Phase.generate, Phase.reward, Phase.data, Phase.optimizer, Phase.checkpoint)
"""Phases in which a rank works mostly for itself; in all others every rank is as slow as the slowest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRank:
    """A rank that takes much longer than the others: its median in one phase and theirs."""

    rank: int
    phase: Phase
    median_seconds: float
    others_seconds: float

    @property
    def sentence(self) -> str:
        """What users are told."""
        return (
            f"rank {self.rank} takes {self.median_seconds / self.others_seconds:.1f} times as long in"
            f" {self.phase.name} as the others ({self.median_seconds:.2f} s against"
            f" {self.others_seconds:.2f} s)"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object shown by `grpo-run status --json`."""
        return {
            "rank": self.rank,
            "phase": self.phase.name,
            "ratio": round(self.median_seconds / self.others_seconds, 2),
            "sentence": self.sentence,
        }


def find_late_ranks(durations_by_rank: Mapping[int, Mapping[PhaseKey, Durations]]) -> list[LateRank]:
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
                found.append(LateRank(rank=rank, phase=phase, median_seconds=own, others_seconds=usual))
    return sorted(found, key=lambda one: (one.others_seconds - one.median_seconds, one.rank))
