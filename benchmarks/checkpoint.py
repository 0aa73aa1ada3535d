"""Measure how long a checkpoint into memory blocks its rank, compared with the trainer's own save.

One process trains a model with more than 200 million parameters for one real step of AdamW, and then saves it
repeatedly with TRL's own `_save_checkpoint`: to a folder on disk, as usual, and captured into a buffer in
memory. A pair is one save of each kind, in the order A B, B A, and so on. After each pair the files on disk
are deleted and the disk is synced, so that no save waits for the writes of another. The first save into
memory also allocates the memory and is reported separately. In each pair the copies are compared with this
machine's memory bandwidth between two buffers, with the same number of threads. At the end the files are
written from memory to disk, their digests are computed, and they are compared byte for byte with the
trainer's own.

Requires about 45 MB of memory and 25 MB of disk per million parameters.
"""

from __future__ import annotations

import contextlib
import ctypes
import filecmp
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.interval import Interval, median_interval

BUFFER_BYTES = 512 << 20
BUFFER_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Wall time and CPU time of this process, in seconds, for the two saves of one pair.

    `memory_bytes_per_second` is the memory bandwidth measured right after them. `copy_seconds` is the part of
    the captured save spent in copies. The kernel's work to write pages to disk is included in neither.
    """

    number: int
    captured_first: bool
    direct_seconds: float
    captured_seconds: float
    copy_seconds: float
    direct_cpu_seconds: float
    captured_cpu_seconds: float
    memory_bytes_per_second: float


class SaveTime(NamedTuple):
    """Wall time, CPU time and copy time of one save, in seconds."""

    seconds: float
    cpu_seconds: float
    copy_seconds: float


class CheckpointBenchmark:
    """The trainer, its snapshot buffer, and the two kinds of saves."""

    def __init__(self, trainer: Any, disk: Path, memory: Path, copy_threads: int) -> None:
        from grpo_run.runtime.snapshots.buffer import SnapshotBuffer

        self.trainer = trainer
        self.copy_threads = copy_threads
        self.disk = disk
        self.memory = memory / "files"
        self.memory.mkdir()
        self.index = memory / "index.json"
        self.buffer = SnapshotBuffer(memory / "buffer")
        self.copy_seconds = 0.0
        self._measure_copies()

    def _measure_copies(self) -> None:
        """Add the time of each copy into the buffer to `copy_seconds`."""
        from grpo_run.runtime.rank.saving import packing

        copy_all = packing.copy_all

        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            copy_all(*args, **kwargs)
            self.copy_seconds += time.perf_counter() - began

        packing.copy_all = timed

    @contextlib.contextmanager
    def output(self, folder: Path) -> Iterator[None]:
        """Redirect the trainer's checkpoints to a folder."""
        self.trainer._get_output_dir = lambda trial: str(folder)
        try:
            yield
        finally:
            del self.trainer._get_output_dir

    def direct(self) -> SaveTime:
        """Save to disk with the unmodified trainer."""
        with self.output(self.disk / "direct"):
            began = time.perf_counter(), time.process_time()
            self.trainer._save_checkpoint(self.trainer.model, None)
            return SaveTime(time.perf_counter() - began[0], time.process_time() - began[1], 0.0)

    def captured(self) -> SaveTime:
        """Save into memory."""
        from grpo_run.runtime.rank.saving.interception import capture_saves

        self.copy_seconds = 0.0
        with self.output(self.memory):
            began = time.perf_counter(), time.process_time()
            self.buffer.begin()
            with capture_saves(self.buffer, self.memory, threads=self.copy_threads) as index:
                self.trainer._save_checkpoint(self.trainer.model, None)
            self.index.write_bytes(index.to_json())
            return SaveTime(time.perf_counter() - began[0], time.process_time() - began[1], self.copy_seconds)

    def delete_files(self) -> None:
        """Delete the files on disk and sync it, because saves of a real training are minutes apart."""
        shutil.rmtree(self.disk / "direct", ignore_errors=True)
        os.sync()

    def write_to_disk(self) -> tuple[float, float]:
        """Return the seconds to write the checkpoint from memory to disk, and to compute its digests."""
        from grpo_run.runtime.checkpoints.digests import digest_file
        from grpo_run.runtime.snapshots.buffer import SnapshotBufferReader
        from grpo_run.runtime.snapshots.index import read_index
        from grpo_run.runtime.snapshots.writer import write_files

        target = self.disk / "from-memory"
        began = time.perf_counter()
        shutil.copytree(self.memory, target)
        with SnapshotBufferReader(self.buffer.path) as reader:
            write_files(read_index(self.index), reader, target)
        written = time.perf_counter()
        for file in target.rglob("*"):
            if file.is_file():
                digest_file(file)
        return written - began, time.perf_counter() - written

    def differing(self) -> list[str]:
        """Return the names of files that differ between the two checkpoints or exist in only one of them."""
        mine, theirs = self.disk / "from-memory", self.disk / "direct"
        names = {
            str(file.relative_to(root))
            for root in (mine, theirs)
            for file in root.rglob("*")
            if file.is_file()
        }
        return sorted(
            name
            for name in names
            if not (mine / name).is_file()
            or not (theirs / name).is_file()
            or not filecmp.cmp(mine / name, theirs / name, shallow=False)
        )


class Memory:
    """Two resident buffers, and the current memory bandwidth between them."""

    def __init__(self, threads: int) -> None:
        import torch

        self.source = torch.full((BUFFER_BYTES,), 1, dtype=torch.uint8)
        self.target = torch.full((BUFFER_BYTES,), 2, dtype=torch.uint8)
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)

    def _copy_part(self, number: int) -> None:
        part = BUFFER_BYTES // self.threads
        ctypes.memmove(self.target.data_ptr() + number * part, self.source.data_ptr() + number * part, part)

    def bytes_per_second(self) -> float:
        """Return the best rate of several copies by torch and by memmove."""
        taken = []
        for _ in range(BUFFER_COPIES):
            began = time.perf_counter()
            self.target.copy_(self.source)
            middle = time.perf_counter()
            list(self.pool.map(self._copy_part, range(self.threads)))
            taken += [middle - began, time.perf_counter() - middle]
        return BUFFER_BYTES / min(taken)


def seconds(value: float) -> str:
    """Format a duration in ms or s."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def between(interval: Interval) -> str:
    """Format a ratio and its interval in percent."""
    if interval.low is None or interval.high is None:
        return f"{interval.median:.1%} (6 pairs needed for an interval)"
    return f"{interval.median:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def measure(options: Any, console: Console, disk: Path, memory: Path) -> dict[str, Any]:
    """Run the benchmark and return the summary and all samples."""
    import torch
    import transformers
    from scripts.model import trained

    from grpo_run.runtime.snapshots.index import read_index

    torch.set_num_threads(1)  # as in a rank of a run with several ranks
    transformers.utils.logging.disable_progress_bar()
    trainer = trained(options.layers, disk / "output")
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    console.print(f"{parameters / 1e6:.0f} million parameters, one step trained", highlight=False)
    bench = CheckpointBenchmark(trainer, disk, memory, options.threads)
    memory_copies = Memory(options.threads)
    first = bench.captured()
    bench.direct()  # the first save imports modules and creates folders that later saves reuse
    bench.delete_files()
    pairs = []
    for number in range(options.pairs):
        captured_first = number % 2 == 0
        if captured_first:
            captured, direct = bench.captured(), bench.direct()
        else:
            direct, captured = bench.direct(), bench.captured()
        if number + 1 < options.pairs:
            bench.delete_files()
        pairs.append(
            Pair(
                number=number,
                captured_first=captured_first,
                direct_seconds=direct.seconds,
                captured_seconds=captured.seconds,
                copy_seconds=captured.copy_seconds,
                direct_cpu_seconds=direct.cpu_seconds,
                captured_cpu_seconds=captured.cpu_seconds,
                memory_bytes_per_second=memory_copies.bytes_per_second(),
            )
        )
        console.print(
            f"pair {number + 1} of {options.pairs}: {seconds(captured.seconds)} into memory, {seconds(direct.seconds)} to disk,"
            f" ratio {captured.seconds / direct.seconds:.1%}",
            highlight=False,
        )
    write_seconds, digest_seconds = bench.write_to_disk()
    differing = bench.differing()
    snapshot_bytes = read_index(bench.index).size_bytes
    return {
        "parameters": parameters,
        "ratio": asdict(median_interval([pair.captured_seconds / pair.direct_seconds for pair in pairs])),
        "cpu_ratio": asdict(
            median_interval([pair.captured_cpu_seconds / pair.direct_cpu_seconds for pair in pairs])
        ),
        "direct_seconds": statistics.median(pair.direct_seconds for pair in pairs),
        "captured_seconds": statistics.median(pair.captured_seconds for pair in pairs),
        "first_captured_seconds": first.seconds,
        "first_copy_seconds": first.copy_seconds,
        "copy_seconds": statistics.median(pair.copy_seconds for pair in pairs),
        "snapshot_bytes": snapshot_bytes,
        "held_bytes": bench.buffer.held_bytes,
        "index_bytes": bench.index.stat().st_size,
        "other_files_bytes": sum(
            file.stat().st_size for file in memory.rglob("files/**/*") if file.is_file()
        ),
        "copy_bytes_per_second": snapshot_bytes / statistics.median(pair.copy_seconds for pair in pairs),
        "memory_bytes_per_second": statistics.median(pair.memory_bytes_per_second for pair in pairs),
        "copy_ratio": asdict(
            median_interval(
                [snapshot_bytes / pair.copy_seconds / pair.memory_bytes_per_second for pair in pairs]
            )
        ),
        "write_seconds": write_seconds,
        "digest_seconds": digest_seconds,
        "differing_files": differing,
        "samples": [asdict(pair) for pair in pairs],
    }


def table(results: dict[str, Any]) -> Table:
    """Return the table to print."""
    giga = 1e9
    rendered = Table(
        title=f"A checkpoint of {results['parameters'] / 1e6:.0f} million parameters, weights and AdamW"
    )
    for column in ("", "median"):
        rendered.add_column(column, justify="right" if column else "left")
    rows = {
        "by the trainer, to disk (no fsync)": seconds(results["direct_seconds"]),
        "into memory": seconds(results["captured_seconds"]),
        "ratio (95 % interval)": between(Interval(**results["ratio"])),
        "ratio of CPU time": between(Interval(**results["cpu_ratio"])),
        "first time into memory": seconds(results["first_captured_seconds"]),
        "copies only": f"{seconds(results['copy_seconds'])}, {results['copy_bytes_per_second'] / giga:.1f} GB/s",
        "memory bandwidth of this machine, buffer to buffer": f"{results['memory_bytes_per_second'] / giga:.1f} GB/s",
        "copies relative to it": between(Interval(**results["copy_ratio"])),
        "in the snapshot buffer": f"{results['snapshot_bytes'] / giga:.2f} GB, {results['held_bytes'] / giga:.2f} GB allocated",
        "index and other files": f"{(results['index_bytes'] + results['other_files_bytes']) / 1e6:.1f} MB",
        "from memory to disk (no fsync)": seconds(results["write_seconds"]),
        "digests": seconds(results["digest_seconds"]),
        "files that differ": ", ".join(results["differing_files"]) or "none",
    }
    for name, value in rows.items():
        rendered.add_row(name, value)
    return rendered


def main() -> int:
    """Run the benchmark. Return 1 if a file differs."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=10, help="number of pairs; default 10")
    parser.add_argument("--layers", type=machine.count, default=14, help="layers of the model; default 14")
    parser.add_argument("--threads", type=machine.count, default=len(os.sched_getaffinity(0)), help="threads that copy; default: number of cores")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=None, help="folder on the disk to measure; default: the temporary directory")  # fmt: skip
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
        "settings": {"pairs": options.pairs, "layers": options.layers, "threads": options.threads},
        "summary": {name: value for name, value in results.items() if name != "samples"},
        "samples": results["samples"],
    }
    machine.finish(console, result, options.json)
    return 1 if results["differing_files"] else 0


if __name__ == "__main__":
    sys.exit(main())
