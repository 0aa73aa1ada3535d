"""Measure the overhead of supervision: the mean step under grpo-run compared with torchrun, in pairs of runs.

Each run is a new pair of ranks that train the same script for a fixed number of steps. A pair has one run
under each launcher, in the order A B, B A, A B, and so on, so that a drift of the machine affects both
equally. Every step performs a fixed amount of work, half sleeping and half computing; a step that waited
"until a deadline" would hide the overhead. The script measures the times; start-up and the first steps do not
count. `--control` compares torchrun with itself, and thereby shows the resolution of the method.

Metrics and all other settings have their defaults: the memory of each phase is measured, and cleanup is
    considered, but
not needed. No checkpoints are saved.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.interval import Interval, median_interval
from parts.launchers import OURS, RANKS, TORCHRUN, LauncherError, Training
from parts.padding import NO_PADDING, Padding, padding_for, unit_seconds
from parts.step_log import StepLog

SKIPPED_STEPS = 5
"""Steps at the start that do not count, because of first allocations and first collectives."""
RUN_SECONDS = 120.0
STEPS_BY_DURATION = {0.2: 30, 0.05: 110}
"""Number of steps per run by intended step duration in seconds; each run trains for about six seconds."""
CALIBRATION_STEPS = 30


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Mean step times of the two runs of one pair, in seconds. `candidate_first` gives their order."""

    step_seconds: float
    number: int
    candidate_first: bool
    candidate_seconds: float
    baseline_seconds: float
    candidate_exit_code: int | None
    baseline_exit_code: int | None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Mean step time of one run. `exit_code` is None if the launcher had to be terminated."""

    step_seconds: float
    exit_code: int | None


def measure_run(launcher: str, folder: Path, steps: int, padding: Padding) -> RunResult:
    """Run the script and return the mean step time over both ranks, without the first five steps.

    If the launcher fails after the last step, the measurement is still valid (torch's Gloo threads can abort
    a rank that exits without destroying its group). The exit code is recorded.

    Raises:
        LauncherError: the run did not complete its steps without interruption.
    """
    arguments = ["--max-steps", str(steps), "--no-save", *padding.arguments]
    with closing(Training(launcher, folder, arguments)) as training:
        code = training.wait(RUN_SECONDS)
    means = []
    for rank in range(RANKS):
        log = StepLog(training.step_log, rank)
        log.update()
        if [end.step for end in log.ends] != list(range(1, steps + 1)):
            reason = f"still running after {RUN_SECONDS:g} s" if code is None else f"exit code {code}"
            raise LauncherError(
                f"a run under {launcher} did not complete {steps} steps in order"
                f" ({reason}):\n{training.tail()}"
            )
        means.append(log.mean_seconds(SKIPPED_STEPS))
    return RunResult(step_seconds=statistics.mean(means), exit_code=code)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary for one step duration.

    Ratios are candidate to baseline within a pair; differences are per step.
    """

    step_seconds: float
    baseline_seconds: float
    candidate_seconds: float
    ratio: Interval
    difference_seconds: Interval


def summarize(step_seconds: float, pairs: Sequence[Pair]) -> Summary:
    """Return the medians over the pairs with their sign-test intervals."""
    return Summary(
        step_seconds=step_seconds,
        baseline_seconds=statistics.median(pair.baseline_seconds for pair in pairs),
        candidate_seconds=statistics.median(pair.candidate_seconds for pair in pairs),
        ratio=median_interval([pair.candidate_seconds / pair.baseline_seconds for pair in pairs]),
        difference_seconds=median_interval(
            [pair.candidate_seconds - pair.baseline_seconds for pair in pairs]
        ),
    )


def table(summaries: Sequence[Summary], candidate: str, pairs: int) -> Table:
    """Return the table to print."""
    rendered = Table(title=f"Mean step, {candidate} compared with {TORCHRUN}, {pairs} pairs per row")
    for column in (
        "intended step",
        TORCHRUN,
        candidate,
        "ratio, median",
        "95 % interval",
        "added per step",
        "95 % interval",
    ):
        rendered.add_column(column, justify="right")

    def between(interval: Interval, scale: float, digits: int) -> str:
        if interval.low is None or interval.high is None:
            return "6 pairs required"
        return f"{interval.low * scale:.{digits}f} to {interval.high * scale:.{digits}f}"

    for row in summaries:
        rendered.add_row(
            f"{row.step_seconds * 1000:.0f} ms",
            f"{row.baseline_seconds * 1000:.1f} ms",
            f"{row.candidate_seconds * 1000:.1f} ms",
            f"{row.ratio.median:.4f}",
            between(row.ratio, 1, 4),
            f"{row.difference_seconds.median * 1000:+.2f} ms",
            between(row.difference_seconds, 1000, 2),
        )
    return rendered


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=20, help="pairs per step duration; default 20")
    parser.add_argument("--control", action="store_true", help="compare torchrun with itself")
    options = parser.parse_args()
    candidate = TORCHRUN if options.control else OURS

    console = Console()
    facts = machine.facts()
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="grpo-run-overhead-") as name:
        folder = Path(name)
        bare = measure_run(TORCHRUN, folder / "calibration", CALIBRATION_STEPS, NO_PADDING).step_seconds
        one_unit = unit_seconds()
        paddings = {length: padding_for(length, bare, one_unit) for length in STEPS_BY_DURATION}
        for number in range(options.pairs):
            for length, steps in STEPS_BY_DURATION.items():
                first = number % 2 == 0
                taken = {}
                for place in ("candidate", "baseline") if first else ("baseline", "candidate"):
                    launcher = candidate if place == "candidate" else TORCHRUN
                    where = folder / f"{length}-{number}-{place}"
                    taken[place] = measure_run(launcher, where, steps, paddings[length])
                pair = Pair(
                    step_seconds=length,
                    number=number,
                    candidate_first=first,
                    candidate_seconds=taken["candidate"].step_seconds,
                    baseline_seconds=taken["baseline"].step_seconds,
                    candidate_exit_code=taken["candidate"].exit_code,
                    baseline_exit_code=taken["baseline"].exit_code,
                )
                pairs.append(pair)
                console.print(
                    f"pair {number + 1} of {options.pairs} at {length * 1000:.0f} ms:"
                    f" {pair.candidate_seconds * 1000:.1f} ms, baseline {pair.baseline_seconds * 1000:.1f}"
                    f" ms, ratio {pair.candidate_seconds / pair.baseline_seconds:.4f}",
                    highlight=False,
                )
    summaries = [
        summarize(length, [p for p in pairs if p.step_seconds == length]) for length in STEPS_BY_DURATION
    ]
    console.print(table(summaries, candidate if candidate != TORCHRUN else "itself", options.pairs))
    result: dict[str, Any] = {
        "benchmark": "overhead",
        "machine": facts,
        "settings": {
            "pairs": options.pairs,
            "candidate": candidate,
            "baseline": TORCHRUN,
            "bare_step_seconds": bare,
            "steps": {str(length): steps for length, steps in STEPS_BY_DURATION.items()},
            "padding": {str(length): asdict(padding) for length, padding in paddings.items()},
        },
        "summary": [asdict(summary) for summary in summaries],
        "samples": [asdict(pair) for pair in pairs],
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"overhead: {error}")
