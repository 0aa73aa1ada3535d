"""Durations of one phase as a histogram that is small enough for shared memory.

48 counters on a logarithmic scale, the longest duration, and the first occurrence. The first one is stored
separately because it includes compilation, connections and cold caches and would distort median and maximum.
Filled by a rank's histogram on the board, merged over ranks and attempts by the supervisor, read by
`deadlines.py`. Does not decide how long is too long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import add
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, model_validator

BUCKETS = 48
SHORTEST_SECONDS = 0.001
"""Upper edge of bucket 0. Bucket b > 0 ends at this value times 2^(b/2), so each spans half an octave."""
_LAST_EDGE_SECONDS = SHORTEST_SECONDS * 2 ** ((BUCKETS - 2) / 2)
_LARGEST_COUNT = 2**53
"""Largest integer that every JSON reader represents exactly."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of a duration: 0 below 1 ms (and for NaN), 47 from 2.3 hours on."""
    if not seconds >= SHORTEST_SECONDS:
        return 0
    if seconds >= _LAST_EDGE_SECONDS:
        return BUCKETS - 1
    return int(2.0 * math.log2(seconds / SHORTEST_SECONDS)) + 1


def lower_edge_seconds(bucket: int) -> float:
    """Return the lower edge of a bucket."""
    return SHORTEST_SECONDS * 2 ** ((bucket - 1) / 2) if bucket else 0.0


def upper_edge_seconds(bucket: int) -> float:
    """Return the upper edge of a bucket; infinity for the last one."""
    return SHORTEST_SECONDS * 2 ** (bucket / 2) if bucket < BUCKETS - 1 else math.inf


@dataclass(frozen=True, slots=True)
class Durations:
    """Measured durations of one phase.

    Args:
        counts: occurrences by bucket, without the first of each attempt.
        first_seconds: duration of the first occurrence of an attempt; 0 if there was none.
        max_seconds: exact longest duration, without first occurrences; 0 if there was none.
        ended_seconds: longest time without progress after which a deadline ended the phase; 0 for never. The
            phase would have lasted longer.
    """

    counts: tuple[int, ...] = (0,) * BUCKETS
    first_seconds: float = 0.0
    max_seconds: float = 0.0
    ended_seconds: float = 0.0

    def __post_init__(self) -> None:
        assert len(self.counts) == BUCKETS, len(self.counts)

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Durations:
        """Return the histogram of one attempt's durations, given in order."""
        iterator = iter(seconds)
        first = next(iterator, 0.0)
        counts = [0] * BUCKETS
        longest = 0.0
        for value in iterator:
            counts[bucket_of(value)] += 1
            longest = max(longest, value)
        return cls(tuple(counts), first, longest)

    @property
    def count(self) -> int:
        """Number of occurrences, without the first of each attempt."""
        return sum(self.counts)

    @property
    def observed(self) -> bool:
        """Whether the phase has been completed at least once."""
        return self.occurrences > 0

    @property
    def longest_seconds(self) -> float:
        """Longest duration without first occurrences.

        A rank counts before it writes the maximum, so both are read.
        """
        highest = max((bucket for bucket, count in enumerate(self.counts) if count), default=0)
        return max(self.max_seconds, lower_edge_seconds(highest))

    @property
    def occurrences(self) -> int:
        """Number of occurrences, counting the first ones as one."""
        return self.count + (self.first_seconds > 0)

    @property
    def shown_seconds(self) -> float:
        """The longest that the phase has taken, in a first occurrence or a later one."""
        return max(self.longest_seconds, self.first_seconds)

    def quantile(self, fraction: float) -> float:
        """Return the upper edge of the bucket that reaches this fraction of the occurrences; 0 without any.

        For the last bucket, which has no upper edge, return the longest duration.
        """
        total = self.count
        if not total:
            return 0.0
        bucket = self._bucket_at(max(1, math.ceil(fraction * total - 1e-9)))
        return self.longest_seconds if bucket == BUCKETS - 1 else upper_edge_seconds(bucket)

    @property
    def median_seconds(self) -> float:
        """Median, interpolated within its bucket on the logarithmic scale; 0 without any occurrence."""
        total = self.count
        if not total:
            return 0.0
        bucket = self._bucket_at((total + 1) // 2)
        if bucket == 0:
            return SHORTEST_SECONDS / 2
        if bucket == BUCKETS - 1:
            return lower_edge_seconds(bucket)
        before = sum(self.counts[:bucket])
        place = (total / 2 - before) / self.counts[bucket]
        return lower_edge_seconds(bucket) * 2 ** (min(max(place, 0.0), 1.0) / 2)

    def _bucket_at(self, order: int) -> int:
        """The bucket of the `order`-th shortest occurrence, counted from 1."""
        return next(bucket for bucket, below in enumerate(accumulate(self.counts)) if below >= order)

    def then(self, later: Durations) -> Durations:
        """Combine with a later attempt: add the counts, keep the longest first occurrence and duration."""
        return Durations(
            tuple(ours + theirs for ours, theirs in zip(self.counts, later.counts, strict=True)),
            max(self.first_seconds, later.first_seconds),
            max(self.max_seconds, later.max_seconds),
            max(self.ended_seconds, later.ended_seconds),
        )

    def ended_after(self, seconds: float) -> Durations:
        """Return a copy that a deadline has ended after `seconds` at least once."""
        return replace(self, ended_seconds=max(self.ended_seconds, seconds))

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values for the journal; only buckets that are not empty, by number."""
        value: dict[str, Any] = {
            "counts": {str(bucket): count for bucket, count in enumerate(self.counts) if count},
            "first_seconds": round(self.first_seconds, 6),
            "max_seconds": round(self.max_seconds, 6),
        }
        if self.ended_seconds:
            value["ended_seconds"] = round(self.ended_seconds, 6)
        return value

    @classmethod
    def from_json(cls, value: object) -> Durations:
        """Return the durations that `as_json` wrote.

        Raises:
            ValueError: `value` has another format.
        """
        stored = _Stored.model_validate(value)
        counts = tuple(stored.counts.get(str(bucket), 0) for bucket in range(BUCKETS))
        return cls(counts, stored.first_seconds, stored.max_seconds, stored.ended_seconds)


class _Stored(BaseModel):
    """Durations in the journal: only buckets that are not empty, by number."""

    model_config = ConfigDict(title="durations", extra="forbid", strict=True, allow_inf_nan=False)

    counts: dict[str, Annotated[int, Field(gt=0, le=_LARGEST_COUNT)]]
    first_seconds: NonNegativeFloat
    max_seconds: NonNegativeFloat
    ended_seconds: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _check(self) -> _Stored:
        if not self.counts.keys() <= {str(bucket) for bucket in range(BUCKETS)}:
            raise ValueError("counts has an unknown bucket")
        if self.max_seconds > 0 and not self.counts:
            raise ValueError("max_seconds without an occurrence")
        return self


HISTOGRAM_EDGES_SECONDS = tuple(upper_edge_seconds(bucket) for bucket in range(0, BUCKETS - 1, 2))
"""Upper edges of a histogram that is exported: every second edge of the buckets."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """Durations to export: every occurrence counts, first ones too.

    Args:
        counts: by edge; the last one has no upper edge.
        sum_seconds: of all occurrences.
    """

    counts: tuple[int, ...] = (0,) * (len(HISTOGRAM_EDGES_SECONDS) + 1)
    sum_seconds: float = 0.0

    @classmethod
    def of_buckets(cls, counts: Sequence[int], sum_seconds: float) -> Histogram:
        """Return the histogram of durations that were counted by `bucket_of`."""
        pairs = map(add, counts[1:-1:2], counts[2:-1:2])
        return cls((counts[0], *pairs, counts[-1]), sum_seconds)

    def with_value(self, seconds: float, times: int = 1) -> Histogram:
        """Return a copy with a duration that has occurred so many times more."""
        counts = list(self.counts)
        counts[(bucket_of(seconds) + 1) // 2] += times
        return Histogram(tuple(counts), self.sum_seconds + times * max(0.0, seconds))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram(tuple(map(add, self.counts, other.counts)), self.sum_seconds + other.sum_seconds)


def merge_ranks(many: Iterable[Durations]) -> Durations:
    """Return the maximum over the ranks of one attempt.

    For every bucket, the number of occurrences at or above it is that of the rank with the most. The total is
    therefore that of the rank with the most occurrences (eight ranks in step have not run eight times as many
    steps), and no quantile is below that rank's own.
    """
    first = longest = ended = 0.0
    at_or_above = [0] * (BUCKETS + 1)
    for durations in many:
        first = max(first, durations.first_seconds)
        longest = max(longest, durations.max_seconds)
        ended = max(ended, durations.ended_seconds)
        total = 0
        for bucket in range(BUCKETS - 1, -1, -1):
            total += durations.counts[bucket]
            at_or_above[bucket] = max(at_or_above[bucket], total)
    counts = tuple(at_or_above[bucket] - at_or_above[bucket + 1] for bucket in range(BUCKETS))
    return Durations(counts, first, longest, ended)
