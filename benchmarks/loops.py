"""Measure what `loop.steps` adds to a step of a hand-written loop on two ranks, paired with the same loop
without it.

One run under `grpo-run launch` measures blocks of both loops in turn (`scripts/loops.py`), so that a drift of
the machine affects both alike. A step is a small one, of about a millisecond: every microsecond that is added
shows. Snapshots that fall due within a block count; the first one of a loop does not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.interval import median_interval
from parts.launchers import BIN, QUIET

SCRIPT = Path(__file__).resolve().parent / "scripts" / "loops.py"
RUN_SECONDS = 300.0
STEPS = 300
MARK = "RESULTS "


def measure(rounds: int) -> list[dict[str, float]]:
    """Return the seconds of a step by kind of loop, for each round of one run."""
    with tempfile.TemporaryDirectory() as name:
        words = [
            "--run-dir",
            f"{name}/run",
            "--metrics-addr",
            "off",
            "--show-ranks",
            "0",
            "--nproc-per-node",
            "2",
        ]
        answer = subprocess.run(
            [str(BIN / "grpo-run"), "launch", *words, str(SCRIPT), "--rounds", str(rounds), "--steps",
            str(STEPS)],
            check=False, cwd=name, env={**os.environ, **QUIET}, capture_output=True, text=True,
            timeout=RUN_SECONDS,
        )  # fmt: skip
    found = [line.partition(MARK)[2] for line in answer.stdout.splitlines() if MARK in line]
    if answer.returncode != 0 or not found:
        raise SystemExit(f"the run failed ({answer.returncode}):\n{(answer.stdout + answer.stderr)[-3000:]}")
    results: list[dict[str, float]] = json.loads(found[0])
    return results


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--rounds", type=machine.count, default=20, help="rounds; default 20")
    options = parser.parse_args()
    facts = machine.facts()
    console = Console()
    rounds = measure(options.rounds)
    added = median_interval([1000 * (one["loop"] - one["plain"]) for one in rounds])
    ends = "too few rounds" if added.low is None else f"{added.low:.3f} to {added.high:.3f}"
    console.print(
        f"step without loop.steps {1000 * median(one['plain'] for one in rounds):.3f} ms, with it"
        f" {1000 * median(one['loop'] for one in rounds):.3f} ms; added in the median {added.median:.3f} ms"
        f" (95 % interval {ends}), 2 ranks, {len(rounds)} rounds of {STEPS} steps"
    )
    result = {
        "benchmark": "loops",
        "machine": facts,
        "settings": {"rounds": options.rounds, "steps": STEPS},
        "runs": rounds,
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
