"""Measure what `consensus.while_any` adds to an iteration of a loop on two ranks, paired with the same loop
without it.

Each run measures blocks of three loops in turn: without any agreement, with `while_any`, and with a flag that
    the script
reduces itself on the default group. The first is subtracted from the others, round by round, so that a drift
of the machine affects all alike. Runs under `grpo-run launch`, where ranks of one node exchange calls in
shared memory, and under torchrun, where they use the default group. Without work between two calls, and with
10 ms of computing and a barrier in each iteration of all three loops: without it, the time for which a rank
waits for the other would count as a cost.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.interval import Interval, median_interval
from parts.launchers import BIN, OURS, QUIET, TORCHRUN

SCRIPT = Path(__file__).resolve().parent / "scripts" / "consensus.py"
RUN_SECONDS = 300.0
ITERATIONS = {0.0: 200, 0.01: 50}
"""Iterations of a block, by seconds of work in each."""
MARK = "RESULTS "


def command(launcher: str, folder: Path) -> list[str]:
    """Return how a launcher starts two ranks whose output is in `folder` or printed."""
    if launcher == OURS:
        words = [
            "grpo-run",
            "launch",
            "--run-dir",
            str(folder / "run"),
            "--metrics-addr",
            "off",
            "--show-ranks",
            "0",
        ]
        return [str(BIN / words[0]), *words[1:], "--nproc-per-node", "2"]
    return [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]


def measure(launcher: str, work_seconds: float, rounds: int) -> list[dict[str, float]]:
    """Return the seconds of an iteration by kind of loop, for each round of one run."""
    with tempfile.TemporaryDirectory() as name:
        options = [
            "--rounds",
            str(rounds),
            "--iterations",
            str(ITERATIONS[work_seconds]),
            "--work-seconds",
            str(work_seconds),
        ]
        answer = subprocess.run(
            [*command(launcher, Path(name)), str(SCRIPT), *options],
            check=False, cwd=name, env={**os.environ, **QUIET}, capture_output=True, text=True,
            timeout=RUN_SECONDS,
        )  # fmt: skip
    found = [line.partition(MARK)[2] for line in answer.stdout.splitlines() if MARK in line]
    if answer.returncode != 0 or not found:
        raise SystemExit(
            f"{launcher} failed ({answer.returncode}):\n{(answer.stdout + answer.stderr)[-3000:]}"
        )
    results: list[dict[str, float]] = json.loads(found[0])
    return results


def shown(interval: Interval) -> str:
    """Format the ends of an interval in milliseconds."""
    if interval.low is None or interval.high is None:
        return "too few rounds"
    return f"{interval.low:.3f} to {interval.high:.3f}"


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--rounds", type=machine.count, default=20, help="rounds of each run; default 20")
    options = parser.parse_args()
    facts = machine.facts()
    console = Console()
    rendered = Table(title="What a loop's iteration takes more than without agreement, 2 ranks")
    for column in (
        "launcher",
        "work",
        "while_any, median",
        "95 % interval",
        "all_reduce by hand, median",
        "95 % interval",
    ):
        rendered.add_column(column, justify="left" if column == "launcher" else "right")
    runs: list[dict[str, Any]] = []
    for launcher in (OURS, TORCHRUN):
        for work_seconds in ITERATIONS:
            rounds = measure(launcher, work_seconds, options.rounds)
            row = [launcher, f"{work_seconds * 1000:g} ms"]
            for kind in ("while_any", "all_reduce"):
                found = median_interval([1000 * (one[kind] - one["plain"]) for one in rounds])
                row += [f"{found.median:.3f} ms", shown(found)]
            rendered.add_row(*row)
            runs.append({"launcher": launcher, "work_seconds": work_seconds, "rounds": rounds})
    console.print(rendered)
    result = {
        "benchmark": "consensus",
        "machine": facts,
        "settings": {"rounds": options.rounds},
        "runs": runs,
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
