"""What does a checkpoint cost the rank that takes it? Into memory beside the trainer's own, in pairs.

One process trains a model of more than 200 million parameters for one real step of AdamW and then saves it again
and again with TRL's own `_save_checkpoint`: to a folder on disk as it always does, and caught into an arena in
memory. A pair is one of each, in the order A B, B A, …; what was written to disk is deleted after each pair, and the
disk comes to rest, so that no leg waits for it on another's behalf. The first time into memory takes the memory too and is told apart.
Copies are compared with what this machine's memory does in the same pair between two buffers, with as many threads.
Afterwards the files are written from memory to disk, digested, and compared byte for byte with the trainer's own.

Needs, for each million parameters, about 45 MB of memory and 25 MB of disk.
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

import machine
from interval import Interval, median_interval

BUFFER_BYTES = 512 << 20
BUFFER_COPIES = 3


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Seconds of the two legs of one pair, on the clock and of this process's processor time.

    `memory_bytes_a_second` is what the machine's memory did right after them. `copy_seconds` is the part of the leg into
    memory that copies take. What the kernel does to bring pages to the disk is in neither.
    """

    number: int
    caught_first: bool
    direct_seconds: float
    caught_seconds: float
    copy_seconds: float
    direct_processor_seconds: float
    caught_processor_seconds: float
    memory_bytes_a_second: float


class Taken(NamedTuple):
    """Seconds of one save: on the clock, of the processor, and in copies."""

    seconds: float
    processor_seconds: float
    copy_seconds: float


class Bench:
    """The trainer, its arena, and the two ways of saving."""

    def __init__(self, trainer: Any, disk: Path, memory: Path, copy_threads: int) -> None:
        from grpo_run.runtime.staging.buffer import SnapshotBuffer

        self.trainer = trainer
        self.copy_threads = copy_threads
        self.disk = disk
        self.memory = memory / "files"
        self.memory.mkdir()
        self.index = memory / "image.json"
        self.arena = SnapshotBuffer(memory / "arena")
        self.copy_seconds = 0.0
        self._copies()

    def _copies(self) -> None:
        """Add up the time of all copies into the arena."""
        from grpo_run.trainers.capture import packing

        copy_all = packing.copy_all

        def timed(*args: Any, **kwargs: Any) -> None:
            began = time.perf_counter()
            copy_all(*args, **kwargs)
            self.copy_seconds += time.perf_counter() - began

        packing.copy_all = timed

    @contextlib.contextmanager
    def output(self, folder: Path) -> Iterator[None]:
        """Have the trainer put its checkpoints elsewhere."""
        self.trainer._get_output_dir = lambda trial: str(folder)
        try:
            yield
        finally:
            del self.trainer._get_output_dir

    def direct(self) -> Taken:
        """A save to disk, as it is."""
        with self.output(self.disk / "direct"):
            began = time.perf_counter(), time.process_time()
            self.trainer._save_checkpoint(self.trainer.model, None)
            return Taken(time.perf_counter() - began[0], time.process_time() - began[1], 0.0)

    def caught(self) -> Taken:
        """A save into memory."""
        from grpo_run.trainers.capture.interception import capture_saves

        self.copy_seconds = 0.0
        with self.output(self.memory):
            began = time.perf_counter(), time.process_time()
            self.arena.begin()
            with capture_saves(self.arena, self.memory, threads=self.copy_threads) as image:
                self.trainer._save_checkpoint(self.trainer.model, None)
            self.index.write_bytes(image.to_json())
            return Taken(time.perf_counter() - began[0], time.process_time() - began[1], self.copy_seconds)

    def forget(self) -> None:
        """Delete what was written to disk, and let the disk come to rest: saves are minutes apart in a training."""
        shutil.rmtree(self.disk / "direct", ignore_errors=True)
        os.sync()

    def materialize(self) -> tuple[float, float]:
        """Seconds to write the checkpoint to disk from memory, and to digest it."""
        from grpo_run.runtime.checkpoints.digests import digest_file
        from grpo_run.runtime.staging.buffer import SnapshotBufferReader
        from grpo_run.runtime.staging.index import read_index
        from grpo_run.runtime.staging.writer import write_files

        target = self.disk / "materialized"
        began = time.perf_counter()
        shutil.copytree(self.memory, target)
        with SnapshotBufferReader(self.arena.path) as reader:
            write_files(read_index(self.index), reader, target)
        written = time.perf_counter()
        for file in target.rglob("*"):
            if file.is_file():
                digest_file(file)
        return written - began, time.perf_counter() - written

    def differing(self) -> list[str]:
        """Files of the two checkpoints that are not the same, byte for byte, or are in one alone."""
        mine, theirs = self.disk / "materialized", self.disk / "direct"
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
    """Two resident buffers, and how fast this machine copies from one to the other just now."""

    def __init__(self, threads: int) -> None:
        import torch

        self.source = torch.full((BUFFER_BYTES,), 1, dtype=torch.uint8)
        self.target = torch.full((BUFFER_BYTES,), 2, dtype=torch.uint8)
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)

    def _move(self, number: int) -> None:
        part = BUFFER_BYTES // self.threads
        ctypes.memmove(self.target.data_ptr() + number * part, self.source.data_ptr() + number * part, part)

    def rate(self) -> float:
        """Bytes a second, the best of a few copies by torch and by memmove."""
        taken = []
        for _ in range(BUFFER_COPIES):
            began = time.perf_counter()
            self.target.copy_(self.source)
            middle = time.perf_counter()
            list(self.pool.map(self._move, range(self.threads)))
            taken += [middle - began, time.perf_counter() - middle]
        return BUFFER_BYTES / min(taken)


def seconds(value: float) -> str:
    """With the unit that reads best."""
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def between(interval: Interval) -> str:
    """A ratio with its interval, in per cent."""
    if interval.low is None or interval.high is None:
        return f"{interval.median:.1%} (6 pairs needed for an interval)"
    return f"{interval.median:.1%} ({interval.low:.1%} to {interval.high:.1%})"


def measure(options: Any, console: Console, disk: Path, memory: Path) -> dict[str, Any]:
    """All figures of the summary, and the samples."""
    import torch
    import transformers
    from scripts.model import trained

    from grpo_run.runtime.staging.index import read_index

    torch.set_num_threads(1)  # as a rank has where there are several
    transformers.utils.logging.disable_progress_bar()
    trainer = trained(options.layers, disk / "output")
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    console.print(f"{parameters / 1e6:.0f} million parameters, one step trained", highlight=False)
    bench = Bench(trainer, disk, memory, options.threads)
    memory_copies = Memory(options.threads)
    first = bench.caught()
    bench.direct()  # the first of these imports and makes what the next ones find made
    bench.forget()
    pairs = []
    for number in range(options.pairs):
        caught_first = number % 2 == 0
        if caught_first:
            caught, direct = bench.caught(), bench.direct()
        else:
            direct, caught = bench.direct(), bench.caught()
        if number + 1 < options.pairs:
            bench.forget()
        pairs.append(
            Pair(
                number=number,
                caught_first=caught_first,
                direct_seconds=direct.seconds,
                caught_seconds=caught.seconds,
                copy_seconds=caught.copy_seconds,
                direct_processor_seconds=direct.processor_seconds,
                caught_processor_seconds=caught.processor_seconds,
                memory_bytes_a_second=memory_copies.rate(),
            )
        )
        console.print(
            f"pair {number + 1} of {options.pairs}: {seconds(caught.seconds)} beside {seconds(direct.seconds)},"
            f" {caught.seconds / direct.seconds:.1%}",
            highlight=False,
        )
    write_seconds, digest_seconds = bench.materialize()
    differing = bench.differing()
    image_bytes = read_index(bench.index).size_bytes
    return {
        "parameters": parameters,
        "ratio": asdict(median_interval([pair.caught_seconds / pair.direct_seconds for pair in pairs])),
        "processor_ratio": asdict(
            median_interval([pair.caught_processor_seconds / pair.direct_processor_seconds for pair in pairs])
        ),
        "direct_seconds": statistics.median(pair.direct_seconds for pair in pairs),
        "caught_seconds": statistics.median(pair.caught_seconds for pair in pairs),
        "first_caught_seconds": first.seconds,
        "first_copy_seconds": first.copy_seconds,
        "copy_seconds": statistics.median(pair.copy_seconds for pair in pairs),
        "image_bytes": image_bytes,
        "held_bytes": bench.arena.held_bytes,
        "index_bytes": bench.index.stat().st_size,
        "other_files_bytes": sum(
            file.stat().st_size for file in memory.rglob("files/**/*") if file.is_file()
        ),
        "copy_bytes_a_second": image_bytes / statistics.median(pair.copy_seconds for pair in pairs),
        "memory_bytes_a_second": statistics.median(pair.memory_bytes_a_second for pair in pairs),
        "copy_ratio": asdict(
            median_interval([image_bytes / pair.copy_seconds / pair.memory_bytes_a_second for pair in pairs])
        ),
        "materialize_seconds": write_seconds,
        "digest_seconds": digest_seconds,
        "differing_files": differing,
        "samples": [asdict(pair) for pair in pairs],
    }


def table(found: dict[str, Any]) -> Table:
    """What is printed."""
    giga = 1e9
    drawn = Table(
        title=f"A checkpoint of {found['parameters'] / 1e6:.0f} million parameters, weights and AdamW"
    )
    for column in ("", "median"):
        drawn.add_column(column, justify="right" if column else "left")
    rows = {
        "as the trainer does, to disk (no fsync)": seconds(found["direct_seconds"]),
        "into memory": seconds(found["caught_seconds"]),
        "ratio (95 % interval)": between(Interval(**found["ratio"])),
        "of processor time": between(Interval(**found["processor_ratio"])),
        "the first time into memory": seconds(found["first_caught_seconds"]),
        "copies alone": f"{seconds(found['copy_seconds'])}, {found['copy_bytes_a_second'] / giga:.1f} GB/s",
        "this machine's memory, buffer to buffer": f"{found['memory_bytes_a_second'] / giga:.1f} GB/s",
        "copies beside it": between(Interval(**found["copy_ratio"])),
        "in the arena": f"{found['image_bytes'] / giga:.2f} GB, {found['held_bytes'] / giga:.2f} GB held",
        "index and other files": f"{(found['index_bytes'] + found['other_files_bytes']) / 1e6:.1f} MB",
        "from memory to disk (no fsync)": seconds(found["materialize_seconds"]),
        "digests": seconds(found["digest_seconds"]),
        "files that differ": ", ".join(found["differing_files"]) or "none",
    }
    for name, value in rows.items():
        drawn.add_row(name, value)
    return drawn


def main() -> int:
    """Measure, print, write. 1 when a file came out different."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=10, help="default 10")
    parser.add_argument("--layers", type=machine.count, default=14, help="of the model; default 14")
    parser.add_argument("--threads", type=machine.count, default=len(os.sched_getaffinity(0)), help="to copy with; default: as many as there are cores")  # fmt: skip
    parser.add_argument("--folder", type=Path, default=None, help="on the disk to save to; default: the temporary one")  # fmt: skip
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
        found = measure(options, console, Path(disk), Path(memory))
    console.print(table(found))
    result = {
        "benchmark": "checkpoint",
        "machine": facts,
        "settings": {"pairs": options.pairs, "layers": options.layers, "threads": options.threads},
        "summary": {name: value for name, value in found.items() if name != "samples"},
        "samples": found["samples"],
    }
    machine.finish(console, result, options.json)
    return 1 if found["differing_files"] else 0


if __name__ == "__main__":
    sys.exit(main())
