"""`grpo-run demo`: train the arithmetic recipe with two ranks, kill one half-way, and write the report.

Starts `grpo-run train` with an injected fault, as the user would, and prints a summary. Writes all files into
one directory.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from grpo_run.cli.command_parser import CommandParser
from grpo_run.cli.report import write_report
from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.trainers.recipes.recipe import load_recipe

DEADLINE_SECONDS = 600.0
STOP_SECONDS = 30.0
MARKER = ".grpo-run-demo"
"""File that marks a directory as made by the demo: no other directory is ever removed."""
COMPARED_STEPS = 20
"""The summary compares the mean rewards of this many first and last steps."""


def main(arguments: Sequence[str]) -> int:
    """Run the demo; 0 if training finished, the fault was recovered and the report is written."""
    parser = CommandParser(
        prog="grpo-run demo",
        description=(
            "Train the arithmetic recipe with two ranks, kill one half-way with SIGKILL, let the run recover,"
            " and write the report of the run. Takes about a minute on two CPU cores."
        ),
    )
    parser.add_argument(
        "--out",
        default="demo-out",
        metavar="DIR",
        help="output directory, replaced by each demo (default: %(default)s)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="settings",
        help="setting of the recipe, for example grpo.max_steps=60 for a shorter demo; can be repeated",
    )
    options = parser.parse_args(arguments)
    steps = load_recipe("arithmetic", options.settings).grpo["max_steps"]
    if not isinstance(steps, int) or steps < 1:
        raise UsageError(f"--set grpo.max_steps={steps}: expected a number of steps")
    out = make_empty(Path(options.out))
    run = RunDirectory(path=out / "run")
    started = time.monotonic()
    words = [
        "train", "arithmetic", "--nproc-per-node", "2", "--run-dir", str(run.path),
        # only GRPO generates, so that the warm start is not meant
        "--show-ranks", "none", "--inject", f"kill@rank1:step{steps // 2 + 5}:phase=generate",
        "--set", f"output_dir={out / 'model'}",
        *(word for setting in options.settings for word in ("--set", setting)),
    ]  # fmt: skip
    print("$ " + " ".join(["grpo-run", *words]), flush=True)
    with subprocess.Popen([sys.executable, "-P", "-m", "grpo_run.cli.main", *words]) as process:
        try:
            code = process.wait(DEADLINE_SECONDS)
        except BaseException:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()  # the ranks exit with it
            raise
    return _report(run, out, code, time.monotonic() - started)


def make_empty(out: Path) -> Path:
    """Create the output directory, or empty it if an earlier demo made it.

    Raises:
        ConfigError: the directory was not made by the demo, or cannot be created.
    """
    try:
        if out.exists():
            if not (out / MARKER).is_file():
                raise ConfigError(f"--out {out}: exists and was not made by the demo; give another directory")
            shutil.rmtree(out)
        out.mkdir(parents=True, mode=0o700)
        (out / MARKER).touch(mode=0o600)
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror or error}") from error
    return out


def _report(run: RunDirectory, out: Path, code: int, seconds: float) -> int:
    """Write the report, print the summary, and return the demo's exit code."""
    from rich.console import Console
    from rich.table import Table

    from grpo_run.dashboards.reports.run_contents import read_run_report
    from grpo_run.dashboards.reports.run_page import as_html

    status = run_reader(run).read()
    console = Console(highlight=False, markup=False)
    console.print()
    console.print(status.sentence, style="bold")
    if code != 0:
        console.print(f"The demo failed: exit code {code}. The journal is {run.journal}.")
        return code
    report, path = read_run_report(run), out / "report.html"
    write_report(path, as_html(report).encode())
    rewards = [mean for _, mean, _, _ in report["curves"].get("reward", ())]
    recovered = [recovery for recovery in status.history.recoveries if recovery.recovery_seconds is not None]
    goodput = status.history.goodput()
    table = Table.grid(padding=(0, 2))
    if rewards:
        table.add_row("reward, first 20 steps", f"{fmean(rewards[:COMPARED_STEPS]):.3f}")
        table.add_row("reward, last 20 steps", f"{fmean(rewards[-COMPARED_STEPS:]):.3f}")
    table.add_row("faults recovered", f"{len(recovered)} of 1")
    for recovery in recovered:
        table.add_row("  from the kill to the next step", f"{recovery.recovery_seconds:.2f} s")
        table.add_row("  steps repeated", str(recovery.lost_steps))
    table.add_row(
        "goodput", "unknown" if goodput is None else f"{goodput:.0%} (start-up and imports included)"
    )
    table.add_row("duration of the demo", f"{seconds:.0f} s")
    table.add_row("report", str(path))
    table.add_row("journal, logs, incident", str(run.path))
    console.print(table)
    return 0 if len(recovered) == 1 else 1
