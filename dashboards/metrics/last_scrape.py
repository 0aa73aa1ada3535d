"""How long the exporter outlives its run, so that a regular scraper reads the run's last state.

A run that has finished and one that was given up differ only in this state. Without a regular scraper nothing
waits. Pure: clocks are passed in. Used by `collector.py`, which knows the scrapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

KEPT_SCRAPES = 6
LONGEST_INTERVAL_SECONDS = 60.0
"""Prometheus' default scrape interval. A run does not stay for scrapers that come less often."""
LATENESS = 1.25
"""A scrape may come this much later than usual, and a second: the scraper and the node are busy too."""


def wait_seconds(scrapes: Sequence[float], now: float) -> float:
    """Return how long to wait for the next scrape; 0 if none is to be expected.

    Args:
        scrapes: times of the last scrapes in ascending order, in monotonic seconds.
        now: monotonic seconds.
    """
    if len(scrapes) < 2:
        return 0.0
    interval = median(later - earlier for earlier, later in pairwise(scrapes))
    if interval > LONGEST_INTERVAL_SECONDS:
        return 0.0
    return max(0.0, scrapes[-1] + LATENESS * interval + 1.0 - now)
