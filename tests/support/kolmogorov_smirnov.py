"""The two-sample test of Kolmogorov and Smirnov."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

RARELY = 1e-3
"""How often two samples of one distribution are as far from each other as `critical` says."""


def distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the greatest difference between two empirical distribution functions."""
    first, second = sorted(one), sorted(other)
    return max(
        abs(bisect_right(first, at) / len(first) - bisect_right(second, at) / len(second))
        for at in {*first, *second}
    )


def critical(one: int, other: int) -> float:
    """Return the distance that two samples of these sizes rarely have; with ties, more rarely."""
    return math.sqrt(-math.log(RARELY / 2) / 2 * (one + other) / (one * other))
