"""Measure whether a run keeps its pace: its last thousand steps compared with its second thousand.

A run under grpo-run and one under torchrun exist at the same time and take turns of 100 steps, as in
`overhead_in_turns.py`, with the log history of every step and, under grpo-run, snapshots. Of each, the
median, the 99th percentile and the longest step of both thousands, and how much the private memory of ranks
and of the launcher has grown between them. The weights at the end must be equal.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from overhead_in_turns import Turns
from parts import machine
from parts.launchers import OURS, RANKS, TORCHRUN, LauncherError, Training
from parts.step_log import StepLog

TURN_STEPS = 100
THOUSAND = 1000
END_SECONDS = 120.0


def step_seconds(training: Training, first: int, last: int) -> list[float]:
    """Return the durations of the steps of rank 0 after `first`, without those in which it was stopped."""
    log = StepLog(training.step_log, 0)
    log.update()
    ends = {end.step: end.at_seconds for end in log.ends}
    return [ends[step] - ends[step - 1] for step in range(first + 1, last + 1) if step % TURN_STEPS > 2]


def private_bytes(training: Training) -> dict[str, int]:
    """Return the private memory of the launcher and, together, of the ranks."""
    log = [StepLog(training.step_log, rank) for rank in range(RANKS)]
    for one in log:
        one.update()
    ranks = [one.last.pid for one in log if one.last is not None]
    return {
        "launcher": psutil.Process(training.pid).memory_full_info().uss,
        "ranks": sum(psutil.Process(pid).memory_full_info().uss for pid in ranks),
    }


def figures(seconds: list[float]) -> dict[str, float]:
    """Return what describes the steps of a thousand."""
    return {
        "median": statistics.median(seconds),
        "p99": statistics.quantiles(seconds, n=100)[98],
        "longest": max(seconds),
    }


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--steps", type=machine.count, default=5000, help="of each run; default 5000")
    options = parser.parse_args()
    if options.steps < 3 * THOUSAND or options.steps % THOUSAND:
        parser.error("--steps must be a multiple of 1000, at least 3000")
    console, facts = Console(), machine.facts()
    arguments = [
        "--max-steps", str(options.steps), "--save-steps", str(options.steps), "--logging-steps", "1",
    ]  # fmt: skip
    summary: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="grpo-run-pace-") as name, ExitStack() as stack:
        trainings = {
            launcher: stack.enter_context(closing(Training(launcher, Path(name) / launcher, arguments)))
            for launcher in (OURS, TORCHRUN)
        }
        turns = {launcher: Turns(training) for launcher, training in trainings.items()}
        memory: dict[str, list[dict[str, int]]] = {launcher: [] for launcher in turns}
        for turn in turns.values():
            stack.callback(turn.resume)
        for last in range(TURN_STEPS, options.steps, TURN_STEPS):
            for launcher in (OURS, TORCHRUN) if last // TURN_STEPS % 2 else (TORCHRUN, OURS):
                turns[launcher].train_until(last)
                if last in (2 * THOUSAND, options.steps - TURN_STEPS):
                    memory[launcher].append(private_bytes(trainings[launcher]))
        for launcher, training in trainings.items():
            turns[launcher].resume()
            if training.wait(END_SECONDS) != 0:
                raise LauncherError(f"{launcher} did not end well:\n{training.tail()}")
            begun = figures(step_seconds(training, THOUSAND, 2 * THOUSAND))
            ended = figures(step_seconds(training, options.steps - THOUSAND, options.steps - TURN_STEPS))
            before, after = memory[launcher]
            summary[launcher] = {
                "second_thousand": begun,
                "last_thousand": ended,
                "ratio": ended["median"] / begun["median"],
                "grown_bytes": {kind: after[kind] - before[kind] for kind in after},
                "digest": (training.output_dir / "weights.sha256").read_text().strip(),
            }
            grown = {kind: size / 2**20 for kind, size in summary[launcher]["grown_bytes"].items()}
            ratio, first_ms = summary[launcher]["ratio"], 1000 * begun["median"]
            last_ms = {name: 1000 * seconds for name, seconds in ended.items()}
            console.print(
                f"{launcher}: steps of {first_ms:.1f} ms in the second thousand, {last_ms['median']:.1f} ms"
                f" in the last (ratio {ratio:.3f}; p99 {last_ms['p99']:.1f} ms, longest"
                f" {last_ms['longest']:.0f} ms); private memory grew by {grown['launcher']:.1f} MiB in the"
                f" launcher and {grown['ranks']:.1f} MiB in the ranks",
                highlight=False,
            )
    equal = len({one["digest"] for one in summary.values()}) == 1
    compared = summary[OURS]["ratio"] / summary[TORCHRUN]["ratio"]
    console.print(f"ratio of the ratios: {compared:.3f}; equal weights: {equal}", highlight=False)
    result = {
        "benchmark": "pace",
        "machine": facts,
        "settings": {"steps": options.steps, "ranks": RANKS},
        "summary": {**summary, "equal_weights": equal},
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"pace: {error}")
