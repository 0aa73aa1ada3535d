"""Measure what `--memory-trace` costs: the mean step with it compared with the same launch without it, in
pairs of runs.

Each run trains `scripts/grpo.py` on one rank with no padding of the step, so that the ratio is the highest
that this model shows. The script measures the times; start-up and the first steps do not count. The order
within a pair alternates.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.interval import median_interval
from parts.launchers import BIN, OURS, SCRIPT, LauncherError, environment
from parts.step_log import StepLog

STEPS = 80
SKIPPED_STEPS = 20
RUN_SECONDS = 300.0


def step_seconds(folder: Path, *, traced: bool, size: float) -> float:
    """Return the mean step of a new run.

    Args:
        folder: where it writes; created.
        traced: with `--memory-trace`.
        size: parameters of the model in millions; 0 for that of the tests.

    Raises:
        LauncherError: the run failed.
    """
    folder.mkdir()
    words = [
        str(BIN / "grpo-run"), "launch", "--fresh", "--metrics-addr", "off", "--run-dir", str(folder / "run"),
        *(["--memory-trace"] if traced else []), str(SCRIPT), "--output-dir", str(folder / "out"),
        "--step-log", str(folder / "steps"), "--cpu", "--no-save", "--max-steps", str(STEPS),
        "--step-seconds", "0.0", "--size", str(size),
    ]  # fmt: skip
    run = subprocess.run(
        words,
        cwd=folder,
        env=environment(OURS),
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        check=False,
    )
    log = StepLog(folder / "steps", 0)
    log.update()
    if run.returncode or len(log.ends) != STEPS:
        raise LauncherError(f"a run ended with code {run.returncode}:\n{run.stdout[-2000:]}")
    return log.mean_seconds(SKIPPED_STEPS)


def main() -> int:
    """Run the benchmark and print its row."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=6, help="pairs of runs; default 6")
    parser.add_argument(
        "--size", type=float, default=0.0, metavar="MILLIONS", help="parameters; default: the tests' model"
    )
    options = parser.parse_args()
    facts = machine.facts()
    taken: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(prefix="grpo-run-memory-trace-") as name:
        for number in range(options.pairs):
            by_kind = {
                traced: step_seconds(Path(name) / f"{number}-{traced}", traced=traced, size=options.size)
                for traced in (number % 2 == 0, number % 2 != 0)
            }
            taken.append((by_kind[True], by_kind[False]))
    ratio = median_interval([traced / plain for traced, plain in taken])
    console = Console()
    console.print(
        f"step without trace {statistics.median(plain for _, plain in taken) * 1000:.1f} ms, with it"
        f" {statistics.median(traced for traced, _ in taken) * 1000:.1f} ms; ratio {ratio.median:.3f}"
        f" ({ratio.low} to {ratio.high}), {options.pairs} pairs"
    )
    result = {
        "benchmark": "memory_trace", "machine": facts,
        "settings": {"pairs": options.pairs, "size": options.size},
        "samples": [{"traced_seconds": traced, "plain_seconds": plain} for traced, plain in taken],
    }  # fmt: skip
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"memory_trace: {error}")
