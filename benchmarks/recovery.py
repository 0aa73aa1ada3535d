"""Measure the time from SIGKILL of a rank until training continues, for three launchers.

All launchers run one script on two ranks with the same schedule of kills, in turn. A rank is killed between
two checkpoints. The benchmark measures the time from the signal until every rank has completed a step in a
new process ("next step"), and until every rank has passed the step that had been reached ("caught up", which
includes the repetition of lost steps). The times come from the script's step log, not from the launcher.

`--size` trains a larger model. Then most of the time until the next step is the script's own: it builds the
model and takes a step. "Beyond script and step" is what remains of it after subtracting, of the same run, the
time from the first line of `main` to `train()` in the new process, and the median of the steps before the
kill.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from math import inf, nan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.kills import RunEnd, Sample, measure, schedule
from parts.launchers import FT_LAUNCHER, NAMES, OURS, RANKS, TORCHRUN, LauncherError, install_peer


def summarize(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Any]:
    """Return median, minimum and maximum by launcher.

    No recovery counts as infinite. Compare with the best peer.
    """
    summary: dict[str, Any] = {}
    for name in names:
        own = [sample for sample in samples if sample.launcher == name]
        row: dict[str, Any] = {"kills": len(own), "recovered": sum(sample.failure is None for sample in own)}
        for field in ("next_step_seconds", "caught_up_seconds", "beyond_seconds"):
            values = [inf if getattr(sample, field) is None else getattr(sample, field) for sample in own]
            figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            row[field] = {key: None if value == inf else value for key, value in figures.items()}
        summary[name] = row
    medians = {name: summary[name]["next_step_seconds"]["median"] for name in names}
    peers = {name: median for name, median in medians.items() if name != OURS and median is not None}
    if medians.get(OURS) and peers:
        best = min(peers, key=lambda name: peers[name])
        summary["best_peer"] = best
        summary["ours_to_best_peer"] = round(medians[OURS] / peers[best], 4)
        ours, theirs = (summary[name]["beyond_seconds"]["median"] for name in (OURS, best))
        if ours is not None and theirs:
            summary["ours_to_best_peer_beyond_script_and_step"] = round(ours / theirs, 4)
    return summary


def table(summary: dict[str, Any], names: Sequence[str], ends: Sequence[RunEnd], deadline: float) -> Table:
    """Return the table to print."""
    rendered = Table(
        title="SIGKILL of a rank: seconds until every rank has completed the next step",
        caption=f"never: not within {deadline:g} s after the kill, or the launcher gave up",
    )
    for column in (
        "launcher",
        "recovered",
        "median",
        "min",
        "max",
        "beyond script and step",
        "caught up, median",
        "runs ended well",
    ):
        rendered.add_column(column, justify="left" if column == "launcher" else "right")

    def shown(value: float | None) -> str:
        return "never" if value is None else f"{value:.2f}"

    for name in names:
        row, own = summary[name], [end for end in ends if end.launcher == name]
        rendered.add_row(
            name,
            f"{row['recovered']}/{row['kills']}",
            *(shown(row["next_step_seconds"][key]) for key in ("median", "min", "max")),
            shown(row["beyond_seconds"]["median"]),
            shown(row["caught_up_seconds"]["median"]),
            f"{sum(end.exit_code == 0 for end in own)}/{len(own)}",
        )
    return rendered


def main() -> int:
    """Measure, print, write."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--kills", type=machine.count, default=10, help="kills per launcher; default 10")
    parser.add_argument("--kills-per-run", type=machine.count, default=5, help="kills per run; default 5")
    parser.add_argument("--launchers", default=f"{OURS},{TORCHRUN},{FT_LAUNCHER}", metavar="NAMES",
    help=f"comma-separated, from {', '.join(NAMES)}; default %(default)s")  # fmt: skip
    parser.add_argument(
        "--deadline", type=float, default=90.0, metavar="SECONDS", help="limit for a recovery; default 90"
    )
    parser.add_argument(
        "--save-steps", type=machine.count, default=10, help="steps between checkpoints; default 10"
    )
    parser.add_argument("--step-seconds", type=float, default=0.05, help="sleep in each step; default 0.05")
    parser.add_argument("--size", type=float, default=0.0, metavar="MILLIONS",
    help="parameters of the model; default: the tests' model")  # fmt: skip
    parser.add_argument("--ranks", type=machine.count, default=RANKS, help="ranks; default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="seed of the schedule of kills")
    options = parser.parse_args()
    names = list(dict.fromkeys(options.launchers.split(",")))
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--launchers {unknown[0]}: choose from {', '.join(NAMES)}")
    if options.save_steps < 5:
        parser.error(
            "--save-steps must be at least 5, because kills are two steps away from every checkpoint"
        )
    options.kills_per_run = min(options.kills_per_run, options.kills)

    console = Console()
    facts = machine.facts()
    samples: list[Sample] = []
    ends: list[RunEnd] = []

    def notify(sample: Sample) -> None:
        outcome = (
            sample.failure
            or f"{sample.next_step_seconds:.2f} s (script {sample.script_seconds:.2f} s, step {sample.step_seconds:.2f} s, beyond {sample.beyond_seconds:.2f} s), caught up {sample.caught_up_seconds:.2f} s"  # noqa: E501
        )
        console.print(
            f"{sample.launcher}: kill {sample.number} of rank {sample.rank} after step {sample.step}:"
            f" {outcome}",
            highlight=False,
        )

    if FT_LAUNCHER in names:
        install_peer()
    runs = schedule(
        options.kills,
        options.kills_per_run,
        options.save_steps,
        options.step_seconds,
        options.seed,
        ranks=options.ranks,
    )
    with tempfile.TemporaryDirectory(prefix="grpo-run-recovery-") as folder:
        for number, kills in enumerate(runs):
            # Rotate the order, so that no launcher always runs directly after the same other one.
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                remaining, part = list(kills), 0
                while remaining:
                    done, end = measure(
                        name, remaining, Path(folder) / f"{name}-{number}-{part}", options, notify
                    )
                    samples += done
                    ends.append(end)
                    remaining, part = remaining[len(done) :], part + 1
    summary = summarize(samples, names)
    console.print(table(summary, names, ends, options.deadline))
    if "best_peer" in summary:
        console.print(
            f"Ratio of grpo-run's median to the best peer's ({summary['best_peer']}):"
            f" {summary['ours_to_best_peer']:.2f}; beyond script and step:"
            f" {summary.get('ours_to_best_peer_beyond_script_and_step', nan):.2f}",
            highlight=False,
        )
    result = {
        "benchmark": "recovery",
        "machine": facts,
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
        "summary": summary,
        "samples": [{**asdict(sample), "beyond_seconds": sample.beyond_seconds} for sample in samples],
        "runs": [asdict(end) for end in ends],
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"recovery: {error}")
