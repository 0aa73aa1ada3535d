"""Why a rank is regularly late: the order of the data, the hardware, or unknown.

What a rank has done is compared with what the others have: a rank that does as much in more time has slower hardware, one
that does more in more time has other data. Only what this proves is said. Pure; called by the supervisor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any

from grpo_run.watchdog.observation import Phase, PhaseKey, Slot
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


SAME_WORK = 1.15
"""Up to this many times the others' work counts as the same."""
EXPLAINED = 0.8
"""More work explains more time if it is this share of it at least."""
DATA_FREE = frozenset({Phase.optimizer, Phase.checkpoint})
"""Phases whose work does not depend on the data."""


class ReadingOrder(str, Enum):
    """In which order a trainer reads its data, as far as it says."""

    shuffled = "shuffled"
    kept = "kept"
    sorted_by_length = "sorted by length"
    unknown = "unknown"

    def __str__(self) -> str:
        return self.value


class Blame(str, Enum):
    """What makes a rank late."""

    data_order = "data order"
    hardware = "hardware"
    unknown = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True, slots=True)
class LateRank:
    """A rank that is regularly late, and why."""

    straggler: Straggler
    blame: Blame
    reason: str

    @property
    def sentence(self) -> str:
        """What users are told."""
        late = self.straggler
        return (
            f"rank {late.rank} takes {late.ratio:.1f} times as long in {late.phase.name} as the others"
            f" ({late.median_seconds:.2f} s against {late.others_seconds:.2f} s); cause: {self.blame}: {self.reason}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object shown by `grpo-run status --json`."""
        return {
            "rank": self.straggler.rank,
            "phase": self.straggler.phase.name,
            "ratio": round(self.straggler.ratio, 2),
            "cause": str(self.blame),
            "sentence": self.sentence,
        }


def explain(
    stragglers: Collection[Straggler], slots: Mapping[int, Slot | None], order: ReadingOrder
) -> list[LateRank]:
    """Return each straggler with its reason.

    Args:
        stragglers: of `find_stragglers`, in their order.
        slots: readings of all local ranks, whose counters cover the attempt.
        order: of the data.
    """
    slow_alike = {one.rank for one in stragglers if one.phase in DATA_FREE}
    return [_explain(one, slots, order, slow_alike=one.rank in slow_alike) for one in stragglers]


def _explain(
    late: Straggler, slots: Mapping[int, Slot | None], order: ReadingOrder, *, slow_alike: bool
) -> LateRank:
    if late.phase in DATA_FREE:
        reason = f"{late.phase.name} does the same on every rank"
        return LateRank(straggler=late, blame=Blame.hardware, reason=reason)
    if late.phase is Phase.data:
        reason = "it waits for its data; its shard, its loader or its disk may be slow"
        return LateRank(straggler=late, blame=Blame.unknown, reason=reason)
    what, counts = _work(late.phase, slots)
    more = _ratio(counts, late.rank)
    if more is None:
        reason = "its work cannot be compared with that of the others"
        return LateRank(straggler=late, blame=Blame.unknown, reason=reason)
    if more <= SAME_WORK:
        if late.phase is Phase.generate or slow_alike:
            reason = f"it {what} as often as the others, but takes longer for each"
            return LateRank(straggler=late, blame=Blame.hardware, reason=reason)
        reason = "its completions are as long as those of the others; a prompt, a service or the machine may be slow"
        return LateRank(straggler=late, blame=Blame.unknown, reason=reason)
    if more >= EXPLAINED * late.ratio and order in (ReadingOrder.kept, ReadingOrder.sorted_by_length):
        how = "is not shuffled" if order is ReadingOrder.kept else "is sorted by length and not shuffled"
        reason = f"it {what} {more:.1f} times as often, and the data set {how}"
        return LateRank(straggler=late, blame=Blame.data_order, reason=reason)
    reason = f"it {what} {more:.1f} times as often as the others"
    if order is ReadingOrder.shuffled:
        reason += ", although the data set is shuffled"
    return LateRank(straggler=late, blame=Blame.unknown, reason=reason)


def _work(phase: Phase, slots: Mapping[int, Slot | None]) -> tuple[str, dict[int, int]]:
    known = {rank: slot for rank, slot in slots.items() if slot is not None}
    if phase is Phase.generate:
        return "runs the model", {rank: slot.generation_passes for rank, slot in known.items()}
    return "scores a token", {rank: slot.tokens_generated for rank, slot in known.items()}


def _ratio(counts: Mapping[int, int], rank: int) -> float | None:
    """The rank's count by the median of the others'; None if one of them is not known."""
    others = [count for other, count in counts.items() if other != rank]
    if not others or not all(others) or not counts.get(rank):
        return None
    return counts[rank] / median(others)
