"""Measure what accounting of memory adds to a step, and what cleanup costs and frees with and without
garbage.

Accounting: one run under `grpo-run launch` on two ranks switches it off and on in blocks of ten steps, and
    each pair of
neighboring blocks is compared. While it is off, time passes in which it spends nothing, so that it may
measure twice as much while it is on: the result is an upper bound.

Cleanup: runs of 60 steps in which one rank leaves 32 MiB in reference cycles of the oldest generation in each
    step, or nothing;
without cleanup, with that of grpo-run, and with a collection every ten steps. The interpreters are fresh
(`--no-preload`), which makes a collection as expensive as it can be: the objects of all libraries are looked
at.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from overhead import unit_seconds
from parts import machine
from parts.interval import median_interval
from parts.launchers import BIN, QUIET

SCRIPT = Path(__file__).resolve().parent / "scripts" / "memory.py"
RUN_SECONDS = 300.0
MARK = "RESULTS "
BLOCK = 10
STEP_SECONDS = 0.05
CLEANUP_STEPS = 60
GARBAGE_MIB = 32
ARMS: dict[str, tuple[list[str], list[str]]] = {
    "no cleanup": (["--cleanup-every", "0"], []),
    "grpo-run": ([], []),
    "every 10 steps": (["--cleanup-every", "0"], ["--collect-every", "10"]),
}
"""By name: options of the launcher, and of the script."""


def run(launcher: list[str], script: list[str]) -> dict[str, Any]:
    """Run the script on two ranks and return what rank 0 has printed.

    Raises:
        SystemExit: the run failed.
    """
    with tempfile.TemporaryDirectory() as name:
        options = [
            "--run-dir", f"{name}/run", "--metrics-addr", "off", "--show-ranks", "0", "--nproc-per-node", "2",
            *launcher,
        ]  # fmt: skip
        answer = subprocess.run(
            [str(BIN / "grpo-run"), "launch", *options, str(SCRIPT), "--output-dir", f"{name}/out", "--cpu",
            *script],
            check=False, cwd=name, env={**os.environ, **QUIET}, capture_output=True, text=True,
            timeout=RUN_SECONDS,
        )  # fmt: skip
    found = [line.partition(MARK)[2] for line in answer.stdout.splitlines() if MARK in line]
    if answer.returncode != 0 or not found:
        raise SystemExit(f"the run failed ({answer.returncode}):\n{(answer.stdout + answer.stderr)[-3000:]}")
    results: dict[str, Any] = json.loads(found[0])
    return results


def accounting(pairs: int, padding: list[str], console: Console) -> dict[str, Any]:
    """Measure the cost of accounting in pairs of blocks."""
    steps = (2 * pairs + 2) * BLOCK
    results = run([], ["--max-steps", str(steps), "--switch", str(BLOCK), *padding])
    added = _added(results, console)
    console.print(
        f"  by its own clock {1000 * results['own_seconds'] / steps:.3f} ms a step,"
        f" {1e6 * results['own_seconds'] / results['readings']:.0f} µs a reading",
        highlight=False,
    )
    return results | {"added_ms": added}


def _added(results: dict[str, Any], console: Console) -> list[float]:
    """Print and return what accounting has added to a step, in milliseconds, for each pair of neighboring
    blocks.
    """
    blocks: list[tuple[bool, float]] = []
    taken = list(zip(results["measured"], results["steps"], strict=False))
    while taken:
        on = taken[0][0]
        length = next((place for place, (other, _) in enumerate(taken) if other != on), len(taken))
        if length == BLOCK:
            blocks.append((on, mean(seconds for _, seconds in taken[1:length])))  # the first one switches
        del taken[:length]
    added = [
        1000 * ((second - first) if on else (first - second))
        for (_, first), (on, second) in list(pairwise(blocks))[::2]
    ]
    found, step = median_interval(added), median(seconds for on, seconds in blocks if not on)
    ends = "too few pairs" if found.low is None else f"{found.low:+.3f} to {found.high:+.3f}"
    console.print(
        f"accounting: step {1000 * step:.1f} ms; added in the median {found.median:+.3f} ms (95 % interval"
        f" {ends}), {found.median / 10 / step:+.2f} % of a step, {len(added)} pairs of blocks of {BLOCK}"
        " steps",
        highlight=False,
    )
    return added


def cleanup(repeats: int, padding: list[str], console: Console) -> list[dict[str, Any]]:
    """Measure all arms, with and without garbage, in turn."""
    samples = []
    for number in range(repeats):
        for garbage in (0, GARBAGE_MIB):
            for arm in list(ARMS)[:: 1 if number % 2 == 0 else -1]:
                launcher, script = ARMS[arm]
                words = ["--max-steps", str(CLEANUP_STEPS), "--garbage-mib", str(garbage), *script, *padding]
                results = run(["--no-preload", *launcher], words)
                samples.append({"arm": arm, "garbage_mib": garbage, **results})
    table = Table(title=f"Cleanup in {CLEANUP_STEPS} steps, means of {repeats} runs")
    for column in (
        "garbage per step",
        "cleanup",
        "mean step",
        "its time",
        "its runs",
        "freed by it",
        "highest private memory",
    ):
        table.add_column(column, justify="right")
    for garbage in (0, GARBAGE_MIB):
        for arm in ARMS:
            of = [one for one in samples if (one["arm"], one["garbage_mib"]) == (arm, garbage)]
            ours = arm == "grpo-run"
            table.add_row(
                f"{garbage} MiB",
                arm,
                f"{1000 * mean(mean(one['steps']) for one in of):.1f} ms",
                f"{mean(one['cleanup_seconds'] for one in of):.2f} s" if ours else "",
                f"{mean(one['cleanup_runs'] for one in of):.1f}" if ours else "",
                f"{mean(one['freed_bytes'] for one in of) / 2**20:.0f} MiB" if ours else "",
                f"{mean(one['highest_anonymous_bytes'] for one in of) / 2**20:.0f} MiB",
            )
    console.print(table)
    return samples


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=30, help="pairs of blocks; default 30")
    parser.add_argument(
        "--repeats", type=machine.count, default=2, help="runs of each kind of cleanup; default 2"
    )
    options = parser.parse_args()
    facts = machine.facts()
    console = Console()
    half = STEP_SECONDS / 4  # the script's own step takes about half of it
    padding = ["--step-seconds", str(half), "--compute-units", str(round(half / unit_seconds()))]
    result = {
        "benchmark": "memory",
        "machine": facts,
        "settings": {"pairs": options.pairs, "repeats": options.repeats, "padding": padding},
        "accounting": accounting(options.pairs, padding, console),
        "cleanup": cleanup(options.repeats, padding, console),
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
