"""Measure how often learned deadlines would end a healthy run, and how long they take to find a hang.

Simulates the durations of a phase: log-normal or of two lengths, one in a thousand 20 times as long, the
median doubling over the run. As in a run, each rule learns from the occurrences that it accepted; an
occurrence that it ended is not learned. Calls the watchdog's own deadline function. `--write` writes the
tables to docs/watchdog.md.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import BUCKETS, SHORTEST_SECONDS, Durations, bucket_of

Seconds = NDArray[np.float64]
Limit = Callable[[Durations], float]

LENGTH = 1_000_000
SHORT_LENGTH = 3_000
SHORT_RUNS = 1_000
CHECKED_LENGTH = 10_000
OUTLIER_CHANCE = 1e-3
OUTLIER_FACTOR = 20.0
BASE_MEDIANS = (0.05, 2.0, 30.0)
DETECT_AFTER = (20, 1_000, 100_000)
CHUNK = 1 << 14
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "watchdog.md"
BEGIN, END = "<!-- false alarms: begin -->", "<!-- false alarms: end -->"


@dataclass(frozen=True, kw_only=True, slots=True)
class Distribution:
    """Durations of a phase in units of its median.

    `sigma` 0 means two lengths: 80 % short, 20 % five times longer.
    """

    name: str
    sigma: float

    def draw(self, median: float, length: int, generator: np.random.Generator) -> Seconds:
        """Draw durations in order; their median drifts to twice its initial value."""
        values: Seconds = np.exp((self.sigma or 0.1) * generator.standard_normal(length))
        if not self.sigma:
            values[generator.random(length) < 0.2] *= 5.0
        values[generator.random(length) < OUTLIER_CHANCE] *= OUTLIER_FACTOR
        drift = 1.0 + np.arange(length) / LENGTH
        return values * drift * median


DISTRIBUTIONS = (
    Distribution(name="log-normal 0.1", sigma=0.1),
    Distribution(name="log-normal 0.3", sigma=0.3),
    Distribution(name="log-normal 0.5", sigma=0.5),
    Distribution(name="log-normal 1.0", sigma=1.0),
    Distribution(name="two lengths", sigma=0.0),
)
SHORT_DISTRIBUTIONS = DISTRIBUTIONS[2:]
SHORT_MEDIANS = BASE_MEDIANS[1:]
"""Medians for which the floor has no effect."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A rule under test.

    Its deadline is never below the longest accepted duration; `alarms` relies on this.
    """

    name: str
    limit: Limit


def learned(name: str, **changes: float) -> Setting:
    """The watchdog's own rule with changed settings."""
    settings = DeadlineSettings(**changes)
    return Setting(
        name=name,
        limit=lambda durations: deadline_seconds(Phase.generate, durations, Occurrence.later, settings),
    )


def times_longest(name: str, factor: Callable[[int], float], floor: float) -> Setting:
    """A margin over the longest duration that depends only on the number of occurrences."""
    return Setting(
        name=name,
        limit=lambda durations: max(
            floor, factor(durations.count) * max(durations.longest_seconds, durations.first_seconds)
        ),
    )


def falling(number: int) -> float:
    """A factor that falls from 25 at 3,000 occurrences to 5 at 20,000, linearly on a logarithmic scale."""
    place = np.clip(np.log(max(number, 1) / 3_000) / np.log(20_000 / 3_000), 0.0, 1.0)
    return float(25.0 - 20.0 * place)


DEFAULTS = learned("**learned, the defaults**")
SETTINGS = (
    times_longest("5 x longest, no floor (NVRx's margin)", lambda number: 5.0, 0.0),
    times_longest("5 x longest, floor 8 s", lambda number: 5.0, 8.0),
    times_longest("25 x longest, floor 8 s", lambda number: 25.0, 8.0),
    times_longest("25 falling to 5 x longest, floor 8 s", falling, 8.0),
    learned("learned, unseen 20", factor_unseen=20.0),
    DEFAULTS,
    learned("learned, floor 8 s", floor_seconds=8.0),
    learned("learned, floor 30 s", floor_seconds=30.0),
    learned("learned, floor 120 s", floor_seconds=120.0),
    learned("learned, seen 3", factor_seen=3.0),
    learned("learned, seen 8", factor_seen=8.0),
    learned("learned, ceiling 7,200 s", ceiling_seconds=7200.0),
    learned("learned, no ceiling", ceiling_seconds=1e9),
)
FIXED_NAME = "10 x median of the first 20, fixed, floor 8 s"


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


def rate(entries: Iterable[RuleResult]) -> str:
    """Format the alarms per million occurrences."""
    rows = list(entries)
    value = 1e6 * sum(row.alarms for row in rows) / sum(row.occurrences for row in rows)
    return "0" if not value else f"{value:.2g}" if value < 10 else f"{value:,.0f}"


def seconds_text(values: list[float]) -> str:
    """Format the median over the seeds."""
    value = float(np.median(values))
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def early(cells: dict[tuple[str, float], RuleResult], base: float, short_runs: int) -> str:
    """Format the number of short runs with an alarm, per 1,000 runs."""
    ended = [cells[distribution.name, base].short_runs_ended for distribution in SHORT_DISTRIBUTIONS]
    return f"{1e3 * sum(ended) / (short_runs * len(ended)):.1f}"


def detection(entry: RuleResult) -> str:
    """Format the deadlines after 20, 1,000 and 100,000 occurrences."""
    return " / ".join(seconds_text(entry.deadlines[mark]) for mark in DETECT_AFTER)


def tables(results: dict[str, dict[tuple[str, float], RuleResult]], short_runs: int) -> list[str]:
    """Return both tables as lines of Markdown."""
    header = [
        "rule", *(distribution.name for distribution in DISTRIBUTIONS), *(f"early, {base:g} s" for base in SHORT_MEDIANS),
        "deadline s, 50 ms phase", "deadline s, 30 s phase",
    ]  # fmt: skip
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for name, cells in results.items():
        row = [
            name,
            *(
                rate(cells[distribution.name, base] for base in BASE_MEDIANS)
                for distribution in DISTRIBUTIONS
            ),
            *(early(cells, base, short_runs) for base in SHORT_MEDIANS),
            detection(cells["log-normal 0.3", BASE_MEDIANS[0]]),
            detection(cells["log-normal 0.3", BASE_MEDIANS[-1]]),
        ]
        lines.append("| " + " | ".join(row) + " |")
    header = ["the defaults on", *(f"{base:g} s: alarms; deadline s" for base in BASE_MEDIANS)]
    lines += ["", "| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    for distribution in DISTRIBUTIONS:
        row = [distribution.name]
        for base in BASE_MEDIANS:
            entry = results[DEFAULTS.name][distribution.name, base]
            row.append(f"{rate([entry])}; {detection(entry)}")
        lines.append("| " + " | ".join(row) + " |")
    return lines


def write(lines: list[str], facts: dict[str, Any], seeds: int, short_runs: int) -> None:
    """Write the tables between the markers in docs/watchdog.md.

    Raises:
        RuntimeError: the markers are missing.
    """
    text = DOCUMENT.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise RuntimeError(f"{DOCUMENT}: {BEGIN} and {END} are missing")
    python = ".".join(facts["python"].split(".")[:2])
    memory = round(facts["memory_bytes"] / 2**30)
    note = (
        f"Date: {facts['date'][:10]}. Machine: {facts['cores']} cores, {memory} GiB, python {python}. {seeds} seeds of"
        f" {LENGTH:,} occurrences for each distribution and each median of 0.05, 2 and 30 s;"
        f" {short_runs:,} runs of {SHORT_LENGTH:,} for each cell"
        " of the early columns."
    )
    DOCUMENT.write_text(before + BEGIN + "\n" + note + "\n\n" + "\n".join(lines) + "\n" + END + after)


def main() -> int:
    """Check the simulation, run it, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--seeds", type=machine.count, default=4, help="long runs per cell; default 4")
    parser.add_argument(
        "--short-runs", type=machine.count, default=SHORT_RUNS, help="short runs per cell; default 1000"
    )
    parser.add_argument("--write", action="store_true", help="write the tables to docs/watchdog.md")
    options = parser.parse_args()
    console = Console(soft_wrap=True)
    facts = machine.facts()
    began = time.monotonic()
    console.print(f"fast and plain simulation agree on {check()} alarms", style="dim")
    results = simulate(options.seeds, options.short_runs)
    lines = tables(results, options.short_runs)
    console.print("\n".join(lines), highlight=False, markup=False)
    if options.write:
        write(lines, facts, options.seeds, options.short_runs)
    result = {
        "benchmark": "false_alarms",
        "machine": facts,
        "settings": {"seeds": options.seeds, "short_runs": options.short_runs, "length": LENGTH},
        "seconds": round(time.monotonic() - began, 1),
        "cells": [
            {"rule": name, "distribution": cell[0], "median_seconds": cell[1], **asdict(entry)}
            for name, cells in results.items()
            for cell, entry in cells.items()
        ],
    }
    console.print(f"{result['seconds']} s", style="dim")
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
