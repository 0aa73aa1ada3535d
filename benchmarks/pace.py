"""Measure whether a step costs late in a run what it costs early: thousands of steps, also under torchrun.

Each launcher trains the same script, one after the other, on two ranks that do nothing but the tiny job. The
step log of the script gives the times. The second thousand is the early one, because the first has the
warm-up. Private memory (of `smaps_rollup`) is read after the second thousand and shortly before the end.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.launchers import OURS, RANKS, TORCHRUN, LauncherError, Training
from parts.run_steps import RunSteps
from parts.step_log import StepLog

THOUSAND = 1000
BEFORE_END = 20
POLL_SECONDS = 0.2
DEADLINE_SECONDS = 4 * 3600.0
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Thousand:
    """The steps of one thousand, in seconds."""

    median: float
    high: float
    largest: float


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One run. `growth_bytes` is by process: `launcher`, and the rank that grew most."""

    launcher: str
    seconds: float
    first: Thousand
    early: Thousand
    late: Thousand
    growth_bytes: dict[str, int]
    digest: str


def private_bytes(pid: int) -> int:
    """Return the memory that only this process has."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


def thousand(durations: list[float], last: int) -> Thousand:
    """Return the thousand steps up to `last`. The first duration is that of step 2, in seconds."""
    steps = durations[max(0, last - THOUSAND - 1) : last - 1]
    return Thousand(
        median=statistics.median(steps), high=statistics.quantiles(steps, n=100)[98], largest=max(steps)
    )


def measure(launcher: str, folder: Path, arguments: list[str], steps: int) -> Pace:
    """Train, and return the pace.

    Raises:
        LauncherError: the run did not end well.
    """
    began = time.monotonic()
    with closing(Training(launcher, folder, [*arguments, "--max-steps", str(steps)])) as training:
        progress = RunSteps(training, poll_seconds=POLL_SECONDS, deadline_seconds=DEADLINE_SECONDS)
        logs = [StepLog(training.step_log, rank) for rank in range(RANKS)]
        sizes = []
        for step in (2 * THOUSAND, steps - BEFORE_END):
            progress.wait(step)
            for log in logs:
                log.update()
            pids = [log.ends[-1].pid for log in logs]
            sizes.append([private_bytes(pid) for pid in (training.pid, *pids)])
        code = training.wait(DEADLINE_SECONDS)
    if code:
        raise LauncherError(f"{launcher} ended with {code}:\n{training.tail()}")
    logs[0].update()
    durations = [later.at_seconds - end.at_seconds for end, later in pairwise(logs[0].ends)]
    grown = [late - early for early, late in zip(*sizes, strict=True)]
    return Pace(
        launcher=launcher,
        seconds=time.monotonic() - began,
        first=thousand(durations, THOUSAND),
        early=thousand(durations, 2 * THOUSAND),
        late=thousand(durations, steps),
        growth_bytes={"launcher": grown[0], "rank": max(grown[1:])},
        digest=(training.output_dir / "weights.sha256").read_text().split()[0],
    )


def table(paces: list[Pace]) -> Table:
    """Return what is printed."""
    rendered = Table(title="Steps in milliseconds: median, 99th percentile, largest")
    columns = (
        "",
        "first 1,000",
        "second 1,000",
        "last 1,000",
        "last / second",
        "grown: launcher, rank",
        "all",
    )
    for column in columns:
        rendered.add_column(column, justify="right")
    for pace in paces:
        rendered.add_row(
            pace.launcher,
            *(
                f"{1000 * one.median:.1f}, {1000 * one.high:.0f}, {1000 * one.largest:.0f}"
                for one in (pace.first, pace.early, pace.late)
            ),
            f"{pace.late.median / pace.early.median:.3f}",
            f"{pace.growth_bytes['launcher'] / MIB:+.1f}, {pace.growth_bytes['rank'] / MIB:+.1f} MiB",
            f"{pace.seconds:.0f} s",
        )
    return rendered


def main() -> int:
    """Run the benchmark and print its table."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--steps", type=machine.count, default=8000, help="at least 3000; default 8000")
    parser.add_argument("--tokens", type=machine.count, default=6, help="of a completion; default 6")
    options = parser.parse_args()
    if options.steps < 3 * THOUSAND:
        parser.error("--steps: at least 3000, so that there is a late thousand beside an early one")
    facts = machine.facts()
    arguments = [
        "--max-completion-length",
        str(options.tokens),
        "--save-steps",
        "500",
        "--save-total-limit",
        "2",
    ]
    arguments += ["--logging-steps", "1"]
    with tempfile.TemporaryDirectory(prefix="grpo-run-pace-") as name:
        paces = [
            measure(launcher, Path(name) / launcher, arguments, options.steps)
            for launcher in (OURS, TORCHRUN)
        ]
    console = Console(width=140)
    console.print(table(paces))
    console.print(f"weights {'equal' if len({pace.digest for pace in paces}) == 1 else 'DIFFERENT'}")
    result = {"benchmark": "pace", "machine": facts, "samples": [asdict(pace) for pace in paces]}
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"pace: {error}")
