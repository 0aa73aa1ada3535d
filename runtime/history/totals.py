"""What is counted over all attempts: by ranks, in phases, of rewards and of checkpoints. Pure.

A rank counts on the board, and each attempt begins with an empty one. Before it is cleared, and before a new
supervisor replaces what the last one has left, the journal's event `rank_counted` keeps the counts; `History`
adds the events up. The exporter adds the counts of the present attempt: those on the board count only until
their event is applied. Steps that are done again count again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import islice

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import CheckpointFailed, CheckpointPublished, RankCounted, StepLogged
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import EndReason, Phase, Slot
from grpo_run.watchdog.rank_metrics import TABLE
from grpo_run.watchdog.stalls.durations import Histogram

Phases = Mapping[Phase, Histogram]

_SLOT_COUNTERS = (
    *(row.field for row in TABLE if row.kind == "counter"),
    *(f"ended_{reason.value}" for reason in EndReason),
)
_MEMORY_COUNTERS = ("retries", "ooms", "released_bytes", "freed_bytes", "spent_seconds")


def event_of(slot: Slot, memory: RankMemory | None, phases: Phases) -> RankCounted:
    """Return the event for what one rank has on the board."""
    counts = {name: slot.value(name) for name in _SLOT_COUNTERS}
    if memory is not None:
        counts |= {name: getattr(memory, name) for name in _MEMORY_COUNTERS}
    return RankCounted(
        rank=slot.rank,
        attempt=slot.attempt,
        counts={name: count for name, count in counts.items() if count},
        phases={phase.name: asdict(one) for phase, one in phases.items()},
    )


@dataclass(frozen=True, kw_only=True)
class _Counted:
    """What a rank has counted until the end of an attempt. Replaced as a whole: scrapes read it meanwhile."""

    attempt: int
    counts: Mapping[str, float]
    phases: Phases


_NOTHING = _Counted(attempt=-1, counts={}, phases={})


@dataclass(kw_only=True)
class RankTotals:
    """Counts of this node's ranks over all attempts that have ended."""

    _ranks: dict[int, _Counted] = field(default_factory=dict)

    def apply(self, event: RankCounted) -> None:
        """Add what one rank has counted; an attempt counts once."""
        rank, attempt = event.rank, event.attempt
        known = self._ranks.get(rank, _NOTHING)
        if attempt <= known.attempt:
            return
        new = {
            Phase[name]: Histogram(tuple(map(int, one["counts"])), float(one["sum_seconds"]))
            for name, one in event.phases.items()
        }
        self._ranks[rank] = _Counted(
            attempt=attempt,
            counts={
                name: known.counts.get(name, 0.0) + event.counts.get(name, 0.0)
                for name in {**known.counts, **event.counts}
            },
            phases=_sum(known.phases, new),
        )

    def total(self, rank: int, attempt: int, name: str, present: float) -> float:
        """Return a count over all attempts.

        Args:
            attempt: of the reading of the board.
            present: what the reading says.
        """
        known = self._ranks.get(rank, _NOTHING)
        return known.counts.get(name, 0.0) + (present if attempt > known.attempt else 0.0)

    def phases(self, present: Iterable[tuple[Slot, Phases]]) -> Phases:
        """Return the durations of phases over all ranks and attempts; `present` is what the board says."""
        board = {slot.rank: (slot.attempt, phases) for slot, phases in present}
        totals = []
        # in this order, or rounding lets a sum fall when an attempt is counted
        for rank in sorted(board.keys() | self._ranks.keys()):
            known = self._ranks.get(rank, _NOTHING)
            attempt, phases = board.get(rank, (-1, {}))
            totals.append(_sum(known.phases, phases) if attempt > known.attempt else known.phases)
        return _sum(*totals)


def _sum(*many: Phases) -> dict[Phase, Histogram]:
    total: dict[Phase, Histogram] = {}
    for phases in many:
        for phase, one in phases.items():
            total[phase] = total[phase] + one if phase in total else one
    return total


class CheckpointResult(str, Enum):
    """What became of a checkpoint. The values are metric labels."""

    published = "published"
    failed = "failed"
    """It could not be written; reported once until one is written again."""
    rejected = "rejected"
    """Refused, because weights are not finite, or not used to resume."""
    skipped = "skipped"
    """Not written for want of space."""


@dataclass(kw_only=True)
class CheckpointTotals:
    """Checkpoints of a run by what became of them, and the last one on disk."""

    results: Counter[CheckpointResult] = field(default_factory=Counter)
    durations: Histogram = field(default_factory=Histogram)
    published_at: float | None = None
    size_bytes: int | None = None

    def apply_published(self, event: CheckpointPublished) -> None:
        """Count a checkpoint that is on disk."""
        self.results[CheckpointResult.published] += 1
        self.published_at = event.time
        if event.size_bytes is not None:
            self.size_bytes = event.size_bytes
        if event.seconds is not None:
            self.durations = self.durations.with_value(event.seconds)

    def apply_failed(self, event: CheckpointFailed) -> None:
        """Count a checkpoint that is not on disk: a rank has not tried, the supervisor has."""
        tried = event.rank is None
        self.results[CheckpointResult.failed if tried else CheckpointResult.skipped] += 1

    def apply_rejected(self) -> None:
        """Count a checkpoint that was refused."""
        self.results[CheckpointResult.rejected] += 1


MOST_FUNCTIONS = 8
OTHER = "other"


class RewardCalls(Event, kw_only=True, tag="reward_latency"):
    """The calls of one reward function in one rank and attempt so far."""

    function: str
    calls: int
    total_seconds: float
    longest_seconds: float


@dataclass(kw_only=True)
class RewardTotals:
    """The reward functions of one run: their calls, and what was logged of them.

    Attributes:
        logged: `mean` and `std` of each function as logged last; at most `MOST_FUNCTIONS` and `other`.
    """

    logged: dict[str, Mapping[str, float]] = field(default_factory=dict)
    _calls: dict[tuple[int, int, str], tuple[int, float]] = field(default_factory=dict)

    def apply(self, event: RewardCalls) -> None:
        """Take the calls of one function in one rank and attempt."""
        key = event.attempt or 0, event.rank or 0, event.function
        self._calls[key] = event.calls, event.total_seconds

    def apply_logged(self, event: StepLogged) -> None:
        """Take a step whose log may have the rewards of each function."""
        if event.reward_functions:
            self.logged = dict(islice(event.reward_functions.items(), MOST_FUNCTIONS + 1))

    def by_function(self) -> dict[str, tuple[int, float]]:
        """Return the calls of each function and their seconds over ranks and attempts; functions beyond
        `MOST_FUNCTIONS` count as `other`, which is always there.
        """
        found = {OTHER: (0, 0.0)}
        names = sorted({function for _, _, function in self._calls})[:MOST_FUNCTIONS]
        for (_, _, function), (calls, seconds) in sorted(self._calls.items()):
            name = function if function in names else OTHER
            before = found.get(name, (0, 0.0))
            found[name] = before[0] + calls, before[1] + seconds
        return found
