"""Guard: the reward has fallen to a much lower level and stays there.

A change-point test with medians and quantiles, which single outliers do not move. The level that the run had reached is
compared with the last rollouts: three in a row for a fall that is large against the noise, twelve for one that is less
so. Both have to lose a share of the level, so a reward that varies around its mean raises no alarm. Pure; called by
`judging.py`. A harder part of the data looks the same, so the default response is a warning.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from grpo_run.watchdog.learning.alarm import Alarm
from grpo_run.watchdog.learning.observations import Series
from grpo_run.watchdog.learning.rules import Guard

LEVEL = 16
"""Rollouts that make up a level."""
LEVEL_STRIDE = 4
"""Rollouts from one candidate for the level to the next; a median of each would cost a millisecond per step."""
NOISE = 64
"""Differences between two rollouts from which the noise is estimated. A trend does not enlarge them."""
SHARE = 0.5
"""Share of the level that has to be lost, without a limit of the user's."""
TESTS = ((3, 5.0), (12, 3.0))
"""Rollouts in a row, and by how many standard deviations all of them have to be below the level. `tests/unit/watchdog/
learning/test_reward_collapse.py` measures false alarms on simulated noise."""
SPREADS = 3.0
"""A reward with an offset loses no share of its level: a fall of this many times its whole spread counts as well."""


def find(series: Series, limit: float | None) -> Alarm | None:
    """Return an alarm if the reward has collapsed.

    Args:
        series: mean reward, one value per rollout.
        limit: share of the level that has to be lost; None for `SHARE`.
    """
    share = limit if limit is not None else SHARE
    for length, deviations in TESTS:
        last = [one.value for one in series[-length:]]
        recent = [one.value for one in series[-length - LEVEL : -length]]
        if len(recent) < LEVEL or max(last) >= median(recent):
            continue  # mostly: what follows takes half a millisecond
        before = [one.value for one in series[:-length]]
        level, sample = _best_level(before)
        low, high = _quantile(sample, 0.05), _quantile(sample, 0.95)
        spread = high - low
        deviation = max(spread / 3.29, _mad_deviation(sample), _noise(before))
        fall = level - max(last)
        large = fall >= share * abs(level) if level else False
        if (
            fall > 0
            and fall >= deviations * deviation
            and max(last) < low
            and (large or _leaves(fall, spread))
        ):
            onset = _onset(series, level, median(last), length)
            return Alarm(
                guard=Guard.reward,
                step=series[-1].step,
                onset=onset,
                sentence=f"The mean reward fell from {level:.3g} to {median(last):.3g} at step {onset} and has stayed there.",
            )
    return None


def _leaves(fall: float, spread: float) -> bool:
    return spread > 0 and fall >= SPREADS * spread


def _best_level(values: Sequence[float]) -> tuple[float, Sequence[float]]:
    """The highest median of `LEVEL` values in a row, and these values."""
    ends = range(len(values), LEVEL - 1, -LEVEL_STRIDE)
    windows = [values[end - LEVEL : end] for end in ends]
    best = max(windows, key=median)
    return median(best), best


def _mad_deviation(values: Sequence[float]) -> float:
    """The standard deviation, from the median absolute deviation."""
    middle = median(values)
    return 1.4826 * median(abs(value - middle) for value in values)


def _noise(values: Sequence[float]) -> float:
    """The standard deviation, from a high quantile of the differences between neighbours.

    It sees rare failures in a reward that is usually perfect, whose median deviation is 0; one outlier does not move it.
    """
    recent = values[-NOISE - 1 :]
    return _quantile([abs(b - a) for a, b in pairwise(recent)], 0.97) / 2.77


def _quantile(values: Sequence[float], fraction: float) -> float:
    ordered = sorted(values)
    return ordered[round(fraction * (len(ordered) - 1))]


def _onset(series: Series, level: float, now: float, length: int) -> int:
    """The step of the first of the last observations that are all nearer to the present than to the old level."""
    middle = (level + now) / 2
    first = len(series) - length
    while first > 0 and series[first - 1].value < middle:
        first -= 1
    return series[first].step
