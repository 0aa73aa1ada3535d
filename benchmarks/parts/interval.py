"""A median and its confidence interval, for any distribution. Used by two benchmarks.

The interval lies between two order statistics and is obtained by inverting the sign test: the number of
values below the true median is binomial(n, 1/2) for every distribution (W. J. Conover, Practical
Nonparametric Statistics, 3rd edition, 1999, section 3.2; M. Hollander, D. A. Wolfe, E. Chicken, Nonparametric
Statistical Methods, 3rd edition, 2014, section 3.6). The values must be independent, but not normal.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median with its interval. `low` and `high` are None for too few values (fewer than 6 for 95 %)."""

    median: float
    low: float | None
    high: float | None
    coverage: float | None


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Return the median with the narrowest symmetric sign-test interval of at least `confidence`.

    Raises:
        ValueError: `values` is empty.
    """
    if not values:
        raise ValueError("cannot compute the median of no values")
    ordered, number = sorted(values), len(values)
    median = statistics.median(ordered)
    # Find the largest cut for which both tails together have a probability of at most 1 - confidence.
    below, cut, coverage = 0, -1, None
    for rank in range(number // 2):
        below += comb(number, rank)
        inside = 1 - 2 * below / 2**number
        if inside < confidence:
            break
        cut, coverage = rank, inside
    if cut < 0:
        return Interval(median=median, low=None, high=None, coverage=None)
    return Interval(median=median, low=ordered[cut], high=ordered[number - 1 - cut], coverage=coverage)
