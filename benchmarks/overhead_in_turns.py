"""Measure the overhead of supervision with runs that take turns: the mean step under grpo-run compared with
torchrun.

Two runs of `overhead.py` follow each other, so a machine whose speed changes within a minute adds that change
to their ratio. Here both runs exist at the same time and one of them is stopped (SIGSTOP to all its
processes): each trains the same twenty steps, then the other does, in the order A B, B A. The step in which a
run was stopped does not count, nor the next one. What grpo-run does by the clock falls due while it is
stopped too, so its periodic work weighs up to twice as much as in a run. `--control` compares torchrun with
itself.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from overhead import CALIBRATION_STEPS, measure_run
from parts import machine
from parts.interval import Interval, median_interval
from parts.launchers import OURS, TORCHRUN, LauncherError, Training
from parts.padding import NO_PADDING, padding_for, unit_seconds
from parts.run_steps import RunSteps

STEP_SECONDS = 0.05
BLOCK_STEPS = 20
UNCOUNTED_STEPS = 2
"""Steps at the start of a block: the one that was stopped, and one that finds the caches of the other run."""
POLL_SECONDS = 0.002
BLOCK_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Block:
    """Mean step times of the same steps under both launchers, in seconds."""

    round: int
    last_step: int
    candidate_first: bool
    candidate_seconds: float
    baseline_seconds: float

    @property
    def ratio(self) -> float:
        """Candidate to baseline."""
        return self.candidate_seconds / self.baseline_seconds


class Turns:
    """One run, which trains only when it has its turn.

    Args:
        training: the run, just started.
    """

    def __init__(self, training: Training) -> None:
        self._training = training
        self._steps = RunSteps(training, poll_seconds=POLL_SECONDS, deadline_seconds=BLOCK_DEADLINE_SECONDS)
        self._pids: set[int] = set()

    def train_until(self, step: int) -> None:
        """Let the run go on until all ranks have ended a step, then stop it.

        Raises:
            LauncherError: the run ended before, or took too long.
        """
        self._signal(signal.SIGCONT)
        self._steps.wait(step)
        self._pids = self._training.processes() | {self._training.pid}
        self._signal(signal.SIGSTOP)

    def step_seconds(self, first: int, last: int) -> float:
        """Return the mean duration of the steps from `first` to `last` over both ranks."""
        return self._steps.mean_seconds(first, last)

    def resume(self) -> None:
        """Continue all processes, so that they can be terminated."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def measure_round(
    number: int, candidate: str, folder: Path, blocks: int, padding: Sequence[str]
) -> list[Block]:
    """Start both runs, let them take turns, and return their blocks."""
    arguments = ["--max-steps", str((blocks + 2) * BLOCK_STEPS), "--no-save", *padding]
    measured = []
    with ExitStack() as stack:
        runs: dict[str, Turns] = {}
        places = ("candidate", "baseline") if number % 2 == 0 else ("baseline", "candidate")
        for place in places:
            launcher = candidate if place == "candidate" else TORCHRUN
            training = stack.enter_context(closing(Training(launcher, folder / place, arguments)))
            runs[place] = Turns(training)
            stack.callback(runs[place].resume)
            runs[place].train_until(BLOCK_STEPS)
        for block in range(blocks):
            before, last = (block + 1) * BLOCK_STEPS, (block + 2) * BLOCK_STEPS
            order = ("candidate", "baseline") if block % 2 == 0 else ("baseline", "candidate")
            for place in order:
                runs[place].train_until(last)
            first = before + UNCOUNTED_STEPS + 1
            measured.append(
                Block(
                    round=number,
                    last_step=last,
                    candidate_first=block % 2 == 0,
                    candidate_seconds=runs["candidate"].step_seconds(first, last),
                    baseline_seconds=runs["baseline"].step_seconds(first, last),
                )
            )
    return measured


def said(interval: Interval, scale: float = 1.0, digits: int = 4) -> str:
    """Return a median with its interval as text."""
    if interval.low is None or interval.high is None:
        return f"{interval.median * scale:.{digits}f} (6 values required for an interval)"
    return (
        f"{interval.median * scale:.{digits}f} ({interval.low * scale:.{digits}f} to"
        f" {interval.high * scale:.{digits}f})"
    )


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument(
        "--rounds", type=machine.count, default=8, help="pairs of new runs that take turns; default 8"
    )
    parser.add_argument("--blocks", type=machine.count, default=20, help="turns of each run; default 20")
    parser.add_argument("--control", action="store_true", help="compare torchrun with itself")
    options = parser.parse_args()
    candidate = TORCHRUN if options.control else OURS

    console = Console()
    facts = machine.facts()
    blocks: list[Block] = []
    with tempfile.TemporaryDirectory(prefix="grpo-run-overhead-") as name:
        folder = Path(name)
        bare = measure_run(TORCHRUN, folder / "calibration", CALIBRATION_STEPS, NO_PADDING).step_seconds
        padding = padding_for(STEP_SECONDS, bare, unit_seconds())
        for number in range(options.rounds):
            found = measure_round(number, candidate, folder / str(number), options.blocks, padding.arguments)
            blocks += found
            console.print(
                f"round {number + 1} of {options.rounds}:"
                f" {statistics.mean(one.candidate_seconds for one in found) * 1000:.1f} ms, baseline"
                f" {statistics.mean(one.baseline_seconds for one in found) * 1000:.1f} ms, ratio"
                f" {said(median_interval([one.ratio for one in found]))}",
                highlight=False,
            )
    rounds = [
        statistics.median(one.ratio for one in blocks if one.round == number)
        for number in range(options.rounds)
    ]
    of_rounds, of_blocks = median_interval(rounds), median_interval([one.ratio for one in blocks])
    added = median_interval([one.candidate_seconds - one.baseline_seconds for one in blocks])
    compared = "itself" if options.control else candidate
    console.print(f"\nMean step of {STEP_SECONDS * 1000:.0f} ms, {compared} compared with {TORCHRUN}:")
    console.print(f"ratio, over {len(blocks)} turns:  {said(of_blocks)}", highlight=False)
    console.print(f"ratio, over {len(rounds)} rounds: {said(of_rounds)}", highlight=False)
    console.print(f"added per step, ms:      {said(added, 1000, 2)}", highlight=False)
    result: dict[str, Any] = {
        "benchmark": "overhead_in_turns",
        "machine": facts,
        "settings": {
            "rounds": options.rounds,
            "blocks": options.blocks,
            "candidate": candidate,
            "baseline": TORCHRUN,
            "padding": asdict(padding),
        },
        "summary": {"turns": asdict(of_blocks), "rounds": asdict(of_rounds), "added_seconds": asdict(added)},
        "samples": [asdict(block) for block in blocks],
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"overhead_in_turns: {error}")
