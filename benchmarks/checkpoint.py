"""Measure how long a checkpoint blocks its rank: into memory, and as the trainer saves it by itself.

One process trains a model for one real step of AdamW, and then saves it repeatedly with TRL's own
`_save_checkpoint`, in three ways:

    reused   into memory, over the files of an earlier snapshot, as a rank does
    plain    into new files in memory
    disk     to a folder on disk, without fsync

Each round has one save of each, in alternating order. After it the files on disk are deleted and the disk is
synced, so that no save waits for the writes of another. The first save into memory also allocates the memory
and is reported separately. At the end the snapshot is copied to disk and digested, as the drain worker does.

Requires about 70 MB of memory and 25 MB of disk per million parameters.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.interval import Interval, median_interval


class CheckpointBenchmark:
    """The trainer, and the three kinds of saves. Each returns the seconds that it took.

    Args:
        trainer: after a step.
        disk: a folder on the disk.
        memory: a folder in memory.
    """

    def __init__(self, trainer: Any, disk: Path, memory: Path) -> None:
        from grpo_run.runtime.snapshots.slot import StagingSlot

        self.trainer = trainer
        self.disk = disk / "direct"
        self.plain_folder = memory / "plain"
        self.slot = StagingSlot(0, memory / "slot")
        self.slot.path.mkdir()

    def _save(self, folder: Path) -> None:
        self.trainer._get_output_dir = lambda trial: str(folder)
        self.trainer._save_checkpoint(self.trainer.model, None)

    def reused(self) -> float:
        """Save as a rank does."""
        from grpo_run.runtime.rank.saving._spare_files import reuse_files

        began = time.perf_counter()
        self.slot.begin_snapshot()
        folder = self.slot.files / "checkpoint-1"
        folder.mkdir()
        with reuse_files(folder, self.slot.spare):
            self._save(self.slot.files)
        return time.perf_counter() - began

    def plain(self) -> float:
        """Save into new files in memory. Deleting them is not counted: the drain worker could do it."""
        began = time.perf_counter()
        self._save(self.plain_folder)
        seconds = time.perf_counter() - began
        shutil.rmtree(self.plain_folder)
        return seconds

    def direct(self) -> float:
        """Save to disk."""
        began = time.perf_counter()
        self._save(self.disk)
        return time.perf_counter() - began

    def end_round(self) -> None:
        """Delete the files on disk and sync it, because saves of a real training are minutes apart."""
        shutil.rmtree(self.disk, ignore_errors=True)
        os.sync()

    def drain(self) -> tuple[float, float]:
        """Return the seconds to copy the snapshot to disk, and to digest it."""
        from grpo_run.runtime.checkpoints.digests import digest_file

        began = time.perf_counter()
        shutil.copytree(self.slot.files, self.disk)
        written = time.perf_counter()
        for file in self.disk.rglob("*"):
            if file.is_file():
                digest_file(file)
        return written - began, time.perf_counter() - written


def seconds(value: float) -> str:
    """Format a duration in ms or s."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def between(interval: Interval) -> str:
    """Format a ratio and its interval."""
    if interval.low is None or interval.high is None:
        return f"{interval.median:.2f} (6 rounds needed for an interval)"
    return f"{interval.median:.2f} ({interval.low:.2f} to {interval.high:.2f})"


def measure(options: Any, console: Console, disk: Path, memory: Path) -> dict[str, Any]:
    """Run the benchmark and return the summary and all samples."""
    import torch
    import transformers
    from scripts.model import trained

    torch.set_num_threads(1)  # as in a rank of a run with several ranks
    transformers.utils.logging.disable_progress_bar()
    trainer = trained(options.layers, options.hidden, disk / "output")
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    console.print(f"{parameters / 1e6:.1f} million parameters, one step trained", highlight=False)
    bench = CheckpointBenchmark(trainer, disk, memory)
    first = bench.reused()
    bench.direct()  # the first save imports modules and creates folders that later saves reuse
    bench.end_round()
    ways: list[tuple[str, Callable[[], float]]] = [
        ("reused", bench.reused),
        ("plain", bench.plain),
        ("disk", bench.direct),
    ]
    samples = []
    for number in range(options.rounds):
        samples.append({name: save() for name, save in (ways if number % 2 == 0 else ways[::-1])})
        bench.end_round()
        shown = ", ".join(f"{name} {seconds(samples[-1][name])}" for name, _ in ways)
        console.print(f"round {number + 1} of {options.rounds}: {shown}", highlight=False)
    write_seconds, digest_seconds = bench.drain()
    return {
        "parameters": parameters,
        "snapshot_bytes": bench.slot.size_bytes(),
        "first_seconds": first,
        "seconds": {name: statistics.median(sample[name] for sample in samples) for name, _ in ways},
        "plain_ratio": asdict(median_interval([sample["plain"] / sample["reused"] for sample in samples])),
        "disk_ratio": asdict(median_interval([sample["disk"] / sample["reused"] for sample in samples])),
        "write_seconds": write_seconds,
        "digest_seconds": digest_seconds,
        "samples": samples,
    }


def table(results: dict[str, Any]) -> Table:
    """Return the table to print."""
    size = f"{results['parameters'] / 1e6:.1f} million parameters, {results['snapshot_bytes'] / 1e9:.2f} GB"
    rendered = Table(title=f"A checkpoint of {size}")
    rendered.add_column("")
    rendered.add_column("median", justify="right")
    rows = {
        "into memory, over earlier files": seconds(results["seconds"]["reused"]),
        "into new files in memory": seconds(results["seconds"]["plain"]),
        "to disk, without fsync": seconds(results["seconds"]["disk"]),
        "new files, relative to earlier ones (95 % interval)": between(Interval(**results["plain_ratio"])),
        "disk, relative to earlier files": between(Interval(**results["disk_ratio"])),
        "first time into memory": seconds(results["first_seconds"]),
        "from memory to disk, without fsync": seconds(results["write_seconds"]),
        "digests": seconds(results["digest_seconds"]),
    }
    for name, value in rows.items():
        rendered.add_row(name, value)
    return rendered


def main() -> int:
    """Run the benchmark."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--rounds", type=machine.count, default=9, help="saves of each kind; default 9")
    parser.add_argument("--layers", type=machine.count, default=12, help="layers of the model; default 12")
    parser.add_argument("--hidden", type=machine.count, default=1024, help="its hidden size; default 1024")
    parser.add_argument("--folder", type=Path, default=None,
    help="folder on the disk to measure; default: the temporary directory")  # fmt: skip
    options = parser.parse_args()
    os.environ.update(
        {"HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    )

    console = Console()
    facts = machine.facts()
    with (
        tempfile.TemporaryDirectory(prefix="grpo-run-checkpoint-", dir=options.folder) as disk,
        tempfile.TemporaryDirectory(prefix="grpo-run-checkpoint-", dir="/dev/shm") as memory,
    ):
        results = measure(options, console, Path(disk), Path(memory))
    console.print(table(results))
    result = {
        "benchmark": "checkpoint",
        "machine": facts,
        "settings": {"rounds": options.rounds, "layers": options.layers, "hidden": options.hidden},
        "summary": {name: value for name, value in results.items() if name != "samples"},
        "samples": results["samples"],
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
