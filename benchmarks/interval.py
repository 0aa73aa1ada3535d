"""A median and its interval, without assuming how the values are spread. Pure; used by `overhead.py`.

The interval lies between two order statistics and comes from inverting the sign test: the number of
values below the true median is binomial(n, 1/2) whatever their distribution (W. J. Conover, Practical
Nonparametric Statistics, 3rd edition, 1999, section 3.2; M. Hollander, D. A. Wolfe, E. Chicken,
Nonparametric Statistical Methods, 3rd edition, 2014, section 3.6). It needs independent values, not normal ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb


@dataclass(frozen=True, kw_only=True)
class Interval:
    """`low` and `high` are None when there are too few values (below 6 for 95 %)."""

    median: float
    low: float | None
    high: float | None
    coverage: float | None


def median_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """The median of `values` with the narrowest symmetric sign-test interval of at least `confidence`.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values to take a median of")
    ordered, number = sorted(values), len(values)
    median = statistics.median(ordered)
    # the largest cut so that both tails together hold at most 1 - confidence
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
