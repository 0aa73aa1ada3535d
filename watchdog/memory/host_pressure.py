"""When host memory is short, and when it will run out: from the working set, PSI, and the growth of the
ranks.

Short memory (`is_short`) asks for measures that harm nobody: to give back what is on disk as well. A restart
is more: it is worth it only for ranks that grow until the kernel kills one of them. A run that keeps using
nearly all of its memory, or that fills it with page cache, is healthy. So the trend decides (`Growth`), not
the level: the anonymous memory of the ranks and their helpers, one value for each step, must have risen
nearly every time, above all that was used before, by an amount that does not fade away, and be about to reach
the limit. Pure; called by `runtime/supervisor`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse

SHORT_FREE_FRACTION = 0.10
"""Memory is short when less of a limit is free, page cache counted as free."""
SHORT_FREE_BYTES = 32 << 30
"""And not while more than this is free: a tenth of a large machine is more than a step needs."""
LEAST_FREE_BYTES = 48 << 20
"""Memory is also short when less than this is free for each rank, and once more: a rank that exits writes to
32 MiB that it shared with the forkserver until then (measured with TRL), and so does the drain worker.
"""
SHORT_PRESSURE = 0.10
"""Share of 10 s in which every task waited for memory (PSI, `full avg10`)."""
KEPT_VALUES = 9
"""Values of steps that the trend is taken from."""
LEAST_VALUES = 6
RISING_FRACTION = 0.75
"""Share of the steps in which the ranks must have grown."""
LEAST_RISE_FRACTION = 0.005
"""Least growth over these steps, as a share of the limit: an allocator's noise is less."""
FADING = 0.9
"""Growth fades if the second half of the steps has less than this share of the growth of the first half."""
FADING_MARGIN = 1.5
EAGER_SECONDS = 600.0
"""A restart that gives much memory back is made so long before the limit is expected to be reached."""
EAGER_GAIN_FRACTION = 0.05
"""Much is this share of the limit."""
LATE_SECONDS = 10.0
"""Any other is made as late as possible: agreeing on a step takes two steps, and a checkpoint some seconds.
"""
LATE_STEPS = 4


class Urgency(Enum):
    """How soon memory runs out."""

    none = 0
    """It does not, as far as the trend shows."""
    late = 1
    """Within the time that a checkpoint takes."""
    eager = 2
    """Within minutes, and a restart gives much back."""


def is_short(use: LimitUse, ranks: int) -> bool:
    """Return whether less of a limit is free than there should be.

    Args:
        ranks: number of ranks on the node.
    """
    least_bytes = max(SHORT_FREE_FRACTION * use.limit_bytes, LEAST_FREE_BYTES * (ranks + 1))
    return use.limit_bytes - use.working_set_bytes < min(least_bytes, SHORT_FREE_BYTES)


def shortage(sample: HostSample) -> str | None:
    """Return in which way memory is short, as a sentence's beginning; None if it is not."""
    short = [use for use in sample.limits if is_short(use, len(sample.ranks))]
    if short:
        use = short[0]
        return f"{use.fraction:.0%} of {use.name} is in use"
    if sample.full_pressure is not None and sample.full_pressure > SHORT_PRESSURE:
        return (
            f"the processes of {sample.cgroup} have waited for memory for {sample.full_pressure:.0%} of the"
            " last 10 s"
        )
    return None


def grown_bytes(sample: HostSample) -> int:
    """Return the memory that grows if a rank leaks: anonymous memory of the ranks and of what they have
    started.
    """
    ranks = sum(one.anonymous_bytes for one in sample.ranks.values())
    return ranks + (sample.data_workers_bytes or 0) + (sample.other_helpers_bytes or 0)


@dataclass(frozen=True, slots=True)
class _Value:
    at: float
    grown_bytes: int


class Growth:
    """How the ranks of one attempt grow from step to step."""

    def __init__(self) -> None:
        self._values: deque[_Value] = deque(maxlen=KEPT_VALUES)
        self._position: tuple[int, int] | None = None
        self._peak: _Value | None = None
        self._base_bytes: int | None = None
        self._highest_bytes = 0
        """Of the values that are not kept any more."""

    def record(self, sample: HostSample, position: tuple[int, int], now: float) -> None:
        """Record a sample; of those within a step the largest counts.

        Args:
            sample: with the memory of every rank.
            position: (train call, step) that is committed.
            now: monotonic seconds.
        """
        value = _Value(now, grown_bytes(sample))
        if self._position is not None and position[0] != self._position[0]:
            self._values.clear()  # another call has another use
            self._base_bytes, self._highest_bytes = None, 0
        elif position != self._position and self._peak is not None:
            if len(self._values) == KEPT_VALUES:
                self._highest_bytes = max(self._highest_bytes, self._values[0].grown_bytes)
            self._values.append(self._peak)
            self._base_bytes = self._base_bytes or self._peak.grown_bytes
        if position != self._position:
            self._position, self._peak = position, None
        if self._peak is None or value.grown_bytes > self._peak.grown_bytes:
            self._peak = value

    def urgency(self, use: LimitUse) -> Urgency:
        """Return how soon the limit is reached if the ranks go on growing.

        Args:
            use: of the nearest limit, now.
        """
        values = list(self._values)
        if len(values) < LEAST_VALUES or self._base_bytes is None:
            return Urgency.none
        rises = [later.grown_bytes - earlier.grown_bytes for earlier, later in pairwise(values)]
        seconds = values[-1].at - values[0].at
        # what has been used and given back before is no growth
        total = values[-1].grown_bytes - max(values[0].grown_bytes, self._highest_bytes)
        if (
            sum(rise > 0 for rise in rises) < RISING_FRACTION * len(rises)
            or total < LEAST_RISE_FRACTION * use.limit_bytes
            or seconds <= 0
        ):
            return Urgency.none
        free_bytes = use.limit_bytes - use.working_set_bytes
        if _fades_before(rises, free_bytes):
            return Urgency.none
        seconds_left = free_bytes / (total / seconds)
        if seconds_left <= max(LATE_SECONDS, LATE_STEPS * seconds / len(rises)):
            return Urgency.late
        gain = values[-1].grown_bytes - self._base_bytes
        if seconds_left <= EAGER_SECONDS and gain >= EAGER_GAIN_FRACTION * use.limit_bytes:
            return Urgency.eager
        return Urgency.none


def _fades_before(rises: list[int], free_bytes: int) -> bool:
    """Whether growth that becomes less from step to step ends before the free memory is used up."""
    half = len(rises) // 2
    earlier, later = sum(rises[:half]) / half, sum(rises[-half:]) / half
    if earlier <= 0 or later >= FADING * earlier:
        return False
    ratio = max(0.0, later / earlier)
    remaining = later * half * ratio / (1 - ratio)
    return remaining * FADING_MARGIN < free_bytes
