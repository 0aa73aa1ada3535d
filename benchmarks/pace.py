"""Measure whether a run keeps its pace: the steps of its last thousand compared with its second thousand.

A run under grpo-run and one under torchrun exist at the same time and take turns of 100 steps, as in
`overhead_in_turns.py`, with TRL's default of gradient checkpointing and a log entry each step; grpo-run takes
its snapshots. Of each run: the median, the 99th percentile and the longest step, the CPU time of a rank in a
step, which the load of the machine changes less, and the growth of the private memory of a rank and of the
launcher. A run of fewer than 3,000 steps is compared by thirds. The weights at the end must be equal.
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
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from overhead_in_turns import Turns
from parts import machine
from parts.launchers import OURS, RANKS, TORCHRUN, LauncherError, Training
from parts.step_log import StepLog

TURN_STEPS = 100
UNCOUNTED_STEPS = 2
"""Steps at the start of a turn: the one that was stopped, and one that finds the caches of the other run."""
PART_STEPS = 1000
FIGURES = ("median", "p99", "longest", "CPU of a rank")
END_SECONDS = 120.0


def step_seconds(training: Training, first: int, last: int) -> list[float]:
    """Return the durations of the counted steps of rank 0 after `first` until `last`."""
    log = StepLog(training.step_log, 0)
    log.update()
    ends = {end.step: end.at_seconds for end in log.ends}
    counted = (step for step in range(first + 1, last + 1) if not 0 < step % TURN_STEPS <= UNCOUNTED_STEPS)
    return [ends[step] - ends[step - 1] for step in counted]


def usage(training: Training) -> dict[str, float]:
    """Return the private memory of the launcher and, on average, of a rank, and the CPU time of a rank."""
    ranks = []
    for rank in range(RANKS):
        log = StepLog(training.step_log, rank)
        log.update()
        assert log.last is not None, "the run was stopped after a step"
        ranks.append(psutil.Process(log.last.pid))
    return {
        "launcher": psutil.Process(training.pid).memory_full_info().uss,
        "rank": statistics.mean(process.memory_full_info().uss for process in ranks),
        "cpu_seconds": statistics.mean(sum(process.cpu_times()[:2]) for process in ranks),
    }


def figures(seconds: list[float]) -> dict[str, float]:
    """Return what describes the steps of a part of a run."""
    return {
        "median": statistics.median(seconds),
        "p99": statistics.quantiles(seconds, n=100, method="inclusive")[98],
        "longest": max(seconds),
    }


def summarize(training: Training, steps: int, used: dict[int, dict[str, float]]) -> dict[str, Any]:
    """Return the figures of a run that has ended.

    Args:
        training: the run.
        steps: that it trained.
        used: its `usage` by step.
    """
    part = min(PART_STEPS, steps // 3 // TURN_STEPS * TURN_STEPS)
    # until the second turn both runs started, and in the last turn neither was stopped
    spans = {
        "first": (2 * TURN_STEPS, part),
        "second": (part, 2 * part),
        "last": (steps - part, steps - TURN_STEPS),
    }
    parts: dict[str, dict[str, float]] = {}
    for name, (first, last) in spans.items():
        cpu_seconds = used[last]["cpu_seconds"] - used[first]["cpu_seconds"]
        parts[name] = figures(step_seconds(training, first, last)) | {
            "CPU of a rank": cpu_seconds / (last - first)
        }
    begun, ended = used[min(2 * TURN_STEPS, part)], used[max(used)]
    return {
        **parts,
        "grown_bytes": {kind: ended[kind] - begun[kind] for kind in ("rank", "launcher")},
        "usage": used,
        "turn_medians": [
            statistics.median(step_seconds(training, first, first + TURN_STEPS))
            for first in range(0, steps, TURN_STEPS)
        ],
        "training_seconds": sum(step_seconds(training, TURN_STEPS, steps - TURN_STEPS)),
        "digest": (training.output_dir / "weights.sha256").read_text().strip(),
    }


def table(summary: dict[str, Any]) -> Table:
    """Return the figures of both runs as a table."""
    grid = Table("", *summary)
    for name in ("first", "second", "last"):
        for figure in FIGURES:
            values = [f"{1000 * one[name][figure]:.1f}" for one in summary.values()]
            grid.add_row(f"{name} part, {figure}, ms", *values)
    for figure in ("median", "CPU of a rank"):
        ratios = [one["last"][figure] / one["second"][figure] for one in summary.values()]
        grid.add_row(f"last to second, {figure}", *(f"{ratio:.3f}" for ratio in ratios))
    for kind in ("rank", "launcher"):
        values = [f"{one['grown_bytes'][kind] / 2**20:.1f}" for one in summary.values()]
        grid.add_row(f"growth of a {kind}, MiB", *values)
    grid.add_row("all counted steps, s", *(f"{one['training_seconds']:.0f}" for one in summary.values()))
    return grid


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--steps", type=machine.count, default=8000, help="of each run; default 8000")
    parser.add_argument("--tokens", type=machine.count, default=6, help="of a completion; default 6")
    options = parser.parse_args()
    if options.steps < 15 * TURN_STEPS or options.steps % TURN_STEPS:
        parser.error(f"--steps must be a multiple of {TURN_STEPS}, at least {15 * TURN_STEPS}")
    console, facts = Console(), machine.facts()
    arguments = [
        "--max-steps", str(options.steps), "--save-steps", str(options.steps), "--logging-steps", "1",
        "--max-completion-length", str(options.tokens), "--checkpointing",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="grpo-run-pace-") as name, ExitStack() as stack:
        trainings = {
            launcher: stack.enter_context(closing(Training(launcher, Path(name) / launcher, arguments)))
            for launcher in (OURS, TORCHRUN)
        }
        turns = {launcher: Turns(training) for launcher, training in trainings.items()}
        used: dict[str, dict[int, dict[str, float]]] = {launcher: {} for launcher in turns}
        for turn in turns.values():
            stack.callback(turn.resume)
        for last in range(TURN_STEPS, options.steps, TURN_STEPS):
            for launcher in (OURS, TORCHRUN) if last // TURN_STEPS % 2 else (TORCHRUN, OURS):
                turns[launcher].train_until(last)
                used[launcher][last] = usage(trainings[launcher])
        for launcher, training in trainings.items():
            turns[launcher].resume()
            if training.wait(END_SECONDS) != 0:
                raise LauncherError(f"{launcher} did not end well:\n{training.tail()}")
        summary = {
            launcher: summarize(training, options.steps, used[launcher])
            for launcher, training in trainings.items()
        }
    console.print(table(summary))
    equal = len({one["digest"] for one in summary.values()}) == 1
    console.print(f"{options.steps} steps, {options.tokens} tokens; equal weights: {equal}", highlight=False)
    result = {
        "benchmark": "pace",
        "machine": facts,
        "settings": {"steps": options.steps, "tokens": options.tokens, "ranks": RANKS},
        "summary": {**summary, "equal_weights": equal},
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"pace: {error}")
