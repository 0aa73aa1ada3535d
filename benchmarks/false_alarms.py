"""Measure how often learned deadlines would end a healthy run, and how long they take to find a hang.

Simulates the durations of a phase: log-normal or of two lengths, one in a thousand 20 times as long, the
median doubling over the run. As in a run, each rule learns from the occurrences that it accepted; an
occurrence that it ended is not learned. Calls the watchdog's own deadline function. `--write` writes the
tables to docs/reference/benchmarks.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.deadline_rules import (
    BASE_MEDIANS,
    DEFAULTS,
    DISTRIBUTIONS,
    LENGTH,
    SHORT_DISTRIBUTIONS,
    SHORT_MEDIANS,
)
from parts.deadline_simulation import DETECT_AFTER, SHORT_LENGTH, RuleResult, check, simulate

SHORT_RUNS = 1_000
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "reference" / "benchmarks.md"
BEGIN, END = "<!-- false alarms: begin -->", "<!-- false alarms: end -->"


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
        "rule", *(distribution.name for distribution in DISTRIBUTIONS),
        *(f"early, {base:g} s" for base in SHORT_MEDIANS),
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
    """Write the tables between the markers in docs/reference/benchmarks.md.

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
        f"Date: {facts['date'][:10]}. Machine: {facts['cores']} cores, {memory} GiB, python {python}. {seeds}"
        f" seeds of {LENGTH:,} occurrences for each distribution and each median of 0.05, 2 and 30 s;"
        f" {short_runs:,} runs of {SHORT_LENGTH:,} for each cell of the early columns."
    )
    DOCUMENT.write_text(before + BEGIN + "\n" + note + "\n\n" + "\n".join(lines) + "\n" + END + after)


def main() -> int:
    """Check the simulation, run it, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--seeds", type=machine.count, default=4, help="long runs per cell; default 4")
    parser.add_argument(
        "--short-runs", type=machine.count, default=SHORT_RUNS, help="short runs per cell; default 1000"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the tables to docs/reference/benchmarks.md"
    )
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
