"""What does supervision cost? The mean step under grpo-run beside torchrun's, in pairs of runs.

Each leg is a fresh pair of ranks training the same script for a fixed number of steps; a pair is one leg
under each launcher, in the order A B, B A, A B, … so that a drift of the machine touches both alike. Every step
does a fixed amount of work: half of it slept, half computed. A step padded "until a deadline" would hide the very cost.
The script takes the times; start-up and the first steps do not count. `--control` puts torchrun in both
places and shows what the method cannot tell apart.

The short steps run past step 100, so that they pay for one clean-up at the default `--hygiene-every 100`; the long
ones do not reach it. Metrics and everything else are at their defaults; no checkpoints in between.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine
from interval import Interval, median_interval
from launchers import OURS, RANKS, TORCHRUN, LauncherError, Training
from scripts.work import compute
from step_log import StepLog

SKIPPED_STEPS = 5
"""Steps at the start that do not count: first allocations, first collectives."""
LEG_SECONDS = 120.0
LENGTHS = {0.2: 30, 0.05: 110}
"""Aimed length of a step in seconds, and how many steps a leg has: about six seconds of training each."""
CALIBRATION_STEPS = 30


@dataclass(frozen=True, kw_only=True)
class Padding:
    """What each step does beside training: `sleep_seconds`, and `compute_units` blocks hashed."""

    sleep_seconds: float
    compute_units: int


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Mean step seconds of the two legs of one pair; `candidate_first` is their order."""

    step_seconds: float
    number: int
    candidate_first: bool
    candidate_seconds: float
    baseline_seconds: float
    candidate_exit_code: int | None
    baseline_exit_code: int | None


@dataclass(frozen=True, kw_only=True)
class Leg:
    """`exit_code` is None where the launcher had to be ended."""

    step_seconds: float
    exit_code: int | None


def leg(launcher: str, folder: Path, steps: int, padding: Padding) -> Leg:
    """Mean step in seconds over both ranks, from the end of step 5 to the end of the last.

    A launcher that fails once every step is done (torch's Gloo threads can abort a rank that leaves without
    destroying its group) has still done what is measured; its exit code is kept.

    Raises:
        LauncherError: the run did not do its steps in one go.
    """
    arguments = [
        "--max-steps", str(steps), "--no-save",
        "--step-seconds", f"{padding.sleep_seconds:.6f}", "--compute-units", str(padding.compute_units),
    ]  # fmt: skip
    with closing(Training(launcher, folder, arguments)) as training:
        code = training.wait(LEG_SECONDS)
    means = []
    for rank in range(RANKS):
        log = StepLog(training.step_log, rank)
        log.update()
        if [end.step for end in log.ends] != list(range(1, steps + 1)):
            reason = f"not ended within {LEG_SECONDS:g} s" if code is None else f"exit code {code}"
            raise LauncherError(
                f"a leg under {launcher} was not {steps} steps in a row ({reason}):\n{training.tail()}"
            )
        first = log.ends[SKIPPED_STEPS - 1]
        means.append((log.ends[-1].at_seconds - first.at_seconds) / (steps - SKIPPED_STEPS))
    return Leg(step_seconds=statistics.mean(means), exit_code=code)


def unit_seconds() -> float:
    """How long this machine takes over one unit of computing: the median of twenty batches."""
    batch, taken = 200, []
    for _ in range(20):
        began = time.perf_counter()
        compute(batch)
        taken.append((time.perf_counter() - began) / batch)
    return statistics.median(taken)


def padding_for(step_seconds: float, bare_seconds: float, one_unit_seconds: float) -> Padding:
    """What brings a step of `bare_seconds` to about `step_seconds`; the same for every leg of the length."""
    half = max(0.0, step_seconds - bare_seconds) / 2
    return Padding(sleep_seconds=half, compute_units=round(half / one_unit_seconds))


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of one step length: ratios are candidate over baseline within a pair, differences are per step."""

    step_seconds: float
    baseline_seconds: float
    candidate_seconds: float
    ratio: Interval
    difference_seconds: Interval


def summarise(step_seconds: float, pairs: Sequence[Pair]) -> Summary:
    """Medians over the pairs, with sign-test intervals."""
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
    """What is printed."""
    drawn = Table(title=f"Mean step, {candidate} beside {TORCHRUN}, {pairs} pairs a row")
    for column in (
        "step aimed at", TORCHRUN, candidate, "ratio, median", "95 % interval", "added a step", "95 % interval",
    ):  # fmt: skip
        drawn.add_column(column, justify="right")

    def between(interval: Interval, scale: float, digits: int) -> str:
        if interval.low is None or interval.high is None:
            return "needs 6 pairs"
        return f"{interval.low * scale:.{digits}f} to {interval.high * scale:.{digits}f}"

    for row in summaries:
        drawn.add_row(
            f"{row.step_seconds * 1000:.0f} ms",
            f"{row.baseline_seconds * 1000:.1f} ms",
            f"{row.candidate_seconds * 1000:.1f} ms",
            f"{row.ratio.median:.4f}",
            between(row.ratio, 1, 4),
            f"{row.difference_seconds.median * 1000:+.2f} ms",
            between(row.difference_seconds, 1000, 2),
        )
    return drawn


def main() -> int:
    """Measure, print, write."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=20, help="for each step length; default 20")
    parser.add_argument("--control", action="store_true", help="compare torchrun with itself")
    options = parser.parse_args()
    candidate = TORCHRUN if options.control else OURS

    console = Console()
    facts = machine.facts()
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="grpo-run-overhead-") as name:
        folder = Path(name)
        nothing = Padding(sleep_seconds=0.0, compute_units=0)
        bare = leg(TORCHRUN, folder / "calibration", CALIBRATION_STEPS, nothing).step_seconds
        one_unit = unit_seconds()
        paddings = {length: padding_for(length, bare, one_unit) for length in LENGTHS}
        for number in range(options.pairs):
            for length, steps in LENGTHS.items():
                first = number % 2 == 0
                taken = {}
                for place in ("candidate", "baseline") if first else ("baseline", "candidate"):
                    launcher = candidate if place == "candidate" else TORCHRUN
                    where = folder / f"{length}-{number}-{place}"
                    taken[place] = leg(launcher, where, steps, paddings[length])
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
                    f" {pair.candidate_seconds * 1000:.1f} ms beside {pair.baseline_seconds * 1000:.1f} ms,"
                    f" ratio {pair.candidate_seconds / pair.baseline_seconds:.4f}",
                    highlight=False,
                )
    summaries = [summarise(length, [p for p in pairs if p.step_seconds == length]) for length in LENGTHS]
    console.print(table(summaries, candidate if candidate != TORCHRUN else "itself", options.pairs))
    result: dict[str, Any] = {
        "benchmark": "overhead",
        "machine": facts,
        "settings": {
            "pairs": options.pairs,
            "candidate": candidate,
            "baseline": TORCHRUN,
            "bare_step_seconds": bare,
            "steps": {str(length): steps for length, steps in LENGTHS.items()},
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
