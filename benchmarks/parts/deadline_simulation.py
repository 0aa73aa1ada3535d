"""Simulate which healthy occurrences of a phase each rule would end, fast and checked against a plain loop.
Used by `false_alarms.py`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from grpo_run.watchdog.stalls.durations import BUCKETS, SHORTEST_SECONDS, Durations, bucket_of
from parts.deadline_rules import (
    BASE_MEDIANS,
    DEFAULTS,
    DISTRIBUTIONS,
    FIXED_NAME,
    LENGTH,
    SETTINGS,
    SHORT_DISTRIBUTIONS,
    SHORT_MEDIANS,
    Distribution,
    Seconds,
    Setting,
    learned,
)

SHORT_LENGTH = 3_000
CHECKED_LENGTH = 10_000
DETECT_AFTER = (20, 1_000, 100_000)
CHUNK = 1 << 14


def buckets(values: Seconds) -> NDArray[np.int64]:
    """Return `bucket_of` of every value."""
    octaves = np.floor(2.0 * np.log2(np.maximum(values, SHORTEST_SECONDS / 2) / SHORTEST_SECONDS)) + 1
    return np.clip(octaves, 0, BUCKETS - 1).astype(np.int64)


def next_above(values: Seconds, start: int, end: int, bound: float) -> int:
    """Return the next index from `start` with a value above the bound, or `end`."""
    while start < end:
        hits = values[start : min(start + CHUNK, end)] > bound
        first = int(hits.argmax())
        if hits[first]:
            return start + first
        start += CHUNK
    return end


def alarms(
    values: Seconds, kinds: NDArray[np.int64], setting: Setting, deadlines: dict[int, float] | None = None
) -> list[int]:
    """Return the indices of healthy occurrences that the rule would have ended.

    A deadline is never below the longest accepted duration, so only longer values can be alarms. For these,
    the deadline function is called with the histogram learned until then.

    Args:
        values: durations in seconds.
        kinds: histogram bucket of each value.
        setting: the rule.
        deadlines: filled with the deadlines after `DETECT_AFTER` occurrences.
    """
    found: list[int] = []
    counts = np.zeros(BUCKETS, dtype=np.int64)
    longest, counted, place = 0.0, 1, 1
    marks = [mark for mark in DETECT_AFTER if mark < len(values)] if deadlines is not None else []
    while place < len(values):
        end = marks[0] + 1 if marks else len(values)
        following = next_above(values, place, end, longest)
        if following == len(values):
            break
        counts += np.bincount(kinds[counted:following], minlength=BUCKETS)
        counted = following
        limit = setting.limit(Durations(tuple(counts.tolist()), float(values[0]), longest))
        if following == end:
            assert deadlines is not None
            deadlines[marks.pop(0)] = limit
        elif values[following] > limit:
            found.append(following)
            counted = following + 1  # an occurrence that was ended is not learned
        else:
            longest = float(values[following])
        place = following + (following != end)
    return found


def alarms_one_by_one(values: Seconds, setting: Setting) -> list[int]:
    """The same result as `alarms`, computed at every occurrence; used to check `alarms`."""
    found = []
    counts, longest = [0] * BUCKETS, 0.0
    for place in range(1, len(values)):
        value = float(values[place])
        if value > setting.limit(Durations(tuple(counts), float(values[0]), longest)):
            found.append(place)
            continue
        counts[bucket_of(value)] += 1
        longest = max(longest, value)
    return found


def check() -> int:
    """Compare the fast simulation with the plain one, and return the number of alarms.

    Raises:
        RuntimeError: the results differ, or there was no alarm to compare.
    """
    tight = learned("tight", floor_seconds=1e-3, factor_seen=1.1, factor_unseen=2.0, first_floor_seconds=1e-3)
    total = 0
    for seed, distribution in enumerate(DISTRIBUTIONS):
        values = distribution.draw(2.0, CHECKED_LENGTH, np.random.default_rng(seed))
        for setting in (SETTINGS[0], DEFAULTS, tight):
            fast, plain = alarms(values, buckets(values), setting, {}), alarms_one_by_one(values, setting)
            if fast != plain:
                raise RuntimeError(
                    f"{distribution.name}, {setting.name}: {fast[:5]} differs from {plain[:5]}"
                )
            total += len(fast)
    if not total:
        raise RuntimeError("the check found no alarm, so it compares nothing")
    return total


@dataclass(slots=True)
class RuleResult:
    """Results of one rule for one distribution and median, over all seeds."""

    alarms: int = 0
    occurrences: int = 0
    short_runs_ended: int = 0
    deadlines: dict[int, list[float]] = field(default_factory=dict)


def simulate(seeds: int, short_runs: int) -> dict[str, dict[tuple[str, float], RuleResult]]:
    """Simulate every rule for every distribution and median."""
    results: dict[str, dict[tuple[str, float], RuleResult]] = {
        name: {} for name in (FIXED_NAME, *(setting.name for setting in SETTINGS))
    }
    for distribution, base in itertools.product(DISTRIBUTIONS, BASE_MEDIANS):
        cell = (distribution.name, base)
        for seed in range(seeds):
            values = distribution.draw(base, LENGTH, np.random.default_rng([seed, int(base * 100)]))
            kinds = buckets(values)
            fixed = max(8.0, 10.0 * float(np.median(values[1:21])))
            entry = results[FIXED_NAME].setdefault(cell, RuleResult())
            entry.alarms += int((values[21:] > fixed).sum())
            entry.occurrences += LENGTH
            for mark in DETECT_AFTER:
                entry.deadlines.setdefault(mark, []).append(fixed)
            for setting in SETTINGS:
                entry = results[setting.name].setdefault(cell, RuleResult())
                deadlines: dict[int, float] = {}
                entry.alarms += len(alarms(values, kinds, setting, deadlines))
                entry.occurrences += LENGTH
                for mark, seconds in deadlines.items():
                    entry.deadlines.setdefault(mark, []).append(seconds)
        if distribution in SHORT_DISTRIBUTIONS and base in SHORT_MEDIANS:
            _short(distribution, base, short_runs, results)
    return results


def _short(
    distribution: Distribution,
    base: float,
    runs: int,
    results: dict[str, dict[tuple[str, float], RuleResult]],
) -> None:
    """Simulate the first occurrences of many runs, because one long run contains few early occurrences."""
    generator = np.random.default_rng(7)
    for _ in range(runs):
        values = distribution.draw(base, SHORT_LENGTH, generator)
        kinds = buckets(values)
        fixed = max(8.0, 10.0 * float(np.median(values[1:21])))
        results[FIXED_NAME][distribution.name, base].short_runs_ended += bool((values[21:] > fixed).any())
        for setting in SETTINGS:
            ended = bool(alarms(values, kinds, setting))
            results[setting.name][distribution.name, base].short_runs_ended += ended
