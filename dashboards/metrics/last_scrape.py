"""How long the exporter outlives its run, so that a regular scraper reads the run's last state.

A run that has finished and one that was given up differ only in this state. Two scrapes are waited for, because the
first may have begun to read before the end, and alert rules see a sample only in their next evaluation. Without a
regular scraper nothing waits. Pure: clocks are passed in. Used by `collector.py`, which knows the scrapes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

KEPT_SCRAPES = 6
LAST_SCRAPES = 2
"""How many scrapes read the last state."""
LONGEST_STAY_SECONDS = 90.0
"""The exporter stays this long at most, for all of the last scrapes together."""
LONGEST_INTERVAL_SECONDS = 60.0
"""Prometheus' default scrape interval. A run does not stay for scrapers that come less often."""
LATENESS = 1.25
"""A scrape may come this much later than usual, and a second: the scraper and the node are busy too."""


def wait_seconds(scrapes: Sequence[float], now: float, *, announced: bool = False) -> float:
    """Return how long to wait for the next scrape; 0 if none is to be expected.

    Args:
        scrapes: times of the last scrapes in ascending order, in monotonic seconds.
        now: monotonic seconds.
        announced: a scraper has named itself, so that even a single scrape is one of a regular scraper.
    """
    if not scrapes or (len(scrapes) < 2 and not announced):
        return 0.0
    interval = (
        median(later - earlier for earlier, later in pairwise(scrapes))
        if len(scrapes) > 1
        else LONGEST_INTERVAL_SECONDS
    )
    if interval > LONGEST_INTERVAL_SECONDS:
        return 0.0
    return max(0.0, scrapes[-1] + LATENESS * interval + 1.0 - now)


def stay_seconds(scrapes: Sequence[float], now: float, *, ended_at: float, announced: bool = False) -> float:
    """Return how long the exporter of a run that has ended stays for the next scrape; 0 once it may leave.

    Args:
        scrapes, now, announced: as of `wait_seconds`.
        ended_at: when the run ended, in monotonic seconds.
    """
    if sum(scrape >= ended_at for scrape in scrapes) >= LAST_SCRAPES:
        return 0.0
    left = max(0.0, ended_at + LONGEST_STAY_SECONDS - now)
    return min(left, wait_seconds(scrapes, now, announced=announced))
