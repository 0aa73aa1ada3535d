"""Measure what a long log history costs: snapshots and recoveries with 100 entries and with many.

Two runs of one script take turns, on two ranks with the same schedule of kills. One begins with a log history
of 100 entries, the other with as many as after a long training. Of each, the time that snapshots block the
ranks comes from the journal, and the time from a SIGKILL until every rank has completed a step in a new
process from the step log. The first snapshot of a run, which has no files in memory to write over, is shown
apart.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.kills import Sample, measure, schedule
from parts.launchers import OURS, RANKS, LauncherError

SHORT = 100


def snapshot_seconds(folder: Path) -> list[float]:
    """Return how long each snapshot of a run blocked rank 0, in order."""
    lines = (folder / "run" / "journal.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return [record["seconds"] for record in records if record["event"] == "checkpoint_staged"]


def main() -> int:
    """Measure, print, write."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument(
        "--entries", type=machine.count, default=100_000, help="of the long history; default 100000"
    )
    parser.add_argument("--pairs", type=machine.count, default=5, help="runs of each; default 5")
    parser.add_argument("--kills-per-run", type=machine.count, default=3, help="kills per run; default 3")
    options = parser.parse_args()
    for name, value in {
        "save_steps": 60, "step_seconds": 0.05, "size": 0.0, "ranks": RANKS, "deadline": 90.0,
    }.items():  # fmt: skip
        setattr(options, name, value)
    console, facts = Console(), machine.facts()
    samples: dict[int, list[Sample]] = {SHORT: [], options.entries: []}
    snapshots: dict[int, list[float]] = {SHORT: [], options.entries: []}
    first: dict[int, list[float]] = {SHORT: [], options.entries: []}
    digests = set()
    runs = schedule(
        options.pairs * options.kills_per_run,
        options.kills_per_run,
        options.save_steps,
        options.step_seconds,
        1,
    )
    with tempfile.TemporaryDirectory(prefix="grpo-run-history-") as folder:
        for number, kills in enumerate(runs):
            for entries in (SHORT, options.entries)[:: 1 if number % 2 else -1]:
                path = Path(folder) / f"{entries}-{number}"
                done, end = measure(
                    OURS, kills, path, options, lambda sample: None, ["--history", str(entries)]
                )
                samples[entries] += done
                digests.add(end.digest)
                begun, *others = snapshot_seconds(path)
                first[entries].append(begun)
                snapshots[entries] += others
                console.print(
                    f"{entries} entries: next step"
                    f" {[sample.next_step_seconds for sample in done]} s after the kills; snapshots of"
                    f" {1000 * statistics.median(others):.1f} ms, the first {1000 * begun:.1f} ms",
                    highlight=False,
                )
    summary: dict[int, Any] = {}
    for entries, own in samples.items():
        recoveries = [sample.next_step_seconds for sample in own]
        summary[entries] = {
            "snapshot_seconds": statistics.median(snapshots[entries]),
            "first_snapshot_seconds": statistics.median(first[entries]),
            "next_step_seconds": statistics.median(value for value in recoveries if value is not None),
            "not_recovered": recoveries.count(None),
        }
    short, long = summary[SHORT], summary[options.entries]
    ratio = long["snapshot_seconds"] / short["snapshot_seconds"]
    later_seconds = statistics.median(
        long_one.next_step_seconds - short_one.next_step_seconds
        for long_one, short_one in zip(samples[options.entries], samples[SHORT], strict=True)
        if long_one.next_step_seconds is not None and short_one.next_step_seconds is not None
    )
    blocks_ms, short_ms, first_ms = (
        1000 * value
        for value in (long["snapshot_seconds"], short["snapshot_seconds"], long["first_snapshot_seconds"])
    )
    console.print(
        f"{options.entries} entries compared with {SHORT}: a snapshot blocks {ratio:.2f} times as long"
        f" ({blocks_ms:.1f} and {short_ms:.1f} ms; the first one of a run {first_ms:.0f} ms); the next step"
        f" after a SIGKILL comes {later_seconds:.2f} s later than {short['next_step_seconds']:.2f} s; not"
        f" recovered: {short['not_recovered'] + long['not_recovered']}; equal weights: {len(digests) == 1}",
        highlight=False,
    )
    result = {
        "benchmark": "history",
        "machine": facts,
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
        "summary": {**summary, "snapshot_ratio": ratio, "next_step_later_seconds": later_seconds},
        "samples": {entries: [asdict(sample) for sample in own] for entries, own in samples.items()},
        "snapshots": snapshots,
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"history: {error}")
