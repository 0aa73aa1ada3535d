"""Measure the components that run inside a training step: board, vote, cleanup and journal.

The benchmark calls the code that runs in a rank. Votes are measured between two real processes, through the
board as on one node, and on Gloo and a TCPStore as between nodes. For the total overhead per step, see
`overhead.py`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from scripts.work import compute

RANKS = 2
CHILD_SECONDS = 180.0
"""Deadline of each measuring process; the slowest one imports TRL first."""
NESTED = 6
"""Nested phases per batch; about the deepest nesting in a real step."""
WARM_VOTES = 20
WORK_SECONDS = 0.05


def batches(number: int, size: int, action: Callable[[], object]) -> list[float]:
    """Return microseconds per call, averaged over each of `number` batches of `size` calls."""
    taken = []
    for _ in range(number):
        began = time.perf_counter_ns()
        for _ in range(size):
            action()
        taken.append((time.perf_counter_ns() - began) / size / 1000)
    return taken


def board(folder: Path, number: int) -> dict[str, list[float]]:
    """Measure, in microseconds, the three writes of a rank and the supervisor's read of one slot."""
    from grpo_run.runtime.board.board import Board
    from grpo_run.watchdog.observation import Phase

    shared = Board.create(folder / "board.mmap", RANKS)
    slot = shared.writer(0, rank=0, pid=os.getpid(), attempt=0)
    phases = list(Phase)[:NESTED]
    enter: list[float] = []
    leave: list[float] = []
    for _ in range(number * 10):
        began = time.perf_counter_ns()
        for phase in phases:
            slot.enter(phase)
        middle = time.perf_counter_ns()
        for phase in reversed(phases):
            slot.leave(phase)
        ended = time.perf_counter_ns()
        enter.append((middle - began) / NESTED / 1000)
        leave.append((ended - middle) / NESTED / 1000)
    return {
        "board: enter a phase": enter,
        "board: leave a phase": leave,
        "board: touch (all fields)": batches(number, 100, slot.publish),
        "board: read one slot": batches(number, 100, lambda: shared.read(0)),
    }


def journal(folder: Path, number: int) -> dict[str, list[float]]:
    """Measure, in microseconds, writing one line with the size of a committed step, and syncing it to
    disk.
    """
    from grpo_run.runtime.history.events import StepCommitted
    from grpo_run.runtime.history.journal import Journal

    lines = Journal(folder / "journal.jsonl", "benchmark")
    lines.attempt = 0

    def write() -> None:
        event = StepCommitted(rank=0, step=1234, train_call=1, target_steps=4096, committed_at=1e9)
        lines.write(event)

    def write_and_sync() -> None:
        write()
        lines.sync()

    return {
        "journal: write a line": batches(number, 50, write),
        "journal: write and fsync": batches(max(5, number // 5), 1, write_and_sync),
    }


def vote_rank(rank: int, port: int, folder: str, transport: str, number: int, answer: Connection) -> None:
    """Measure votes in one of two processes; send the microseconds by name."""
    import torch
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from grpo_run.runtime.board.board import Board
    from grpo_run.runtime.rank.collective_recorder import Recorder
    from grpo_run.runtime.rank.gloo_transport import GlooTransport
    from grpo_run.runtime.rank.transport import SharedMemoryTransport, Transport
    from grpo_run.runtime.rank.vote import Vote, VoteGroup

    torch.set_num_threads(1)
    name = "grpo_run/vote"
    shared = Board.open(Path(folder) / "votes.mmap", writable=True)
    slot = shared.writer(rank, rank=rank, pid=os.getpid(), attempt=0)
    common = {"name": name, "rank": rank, "timeout_seconds": 60.0, "recorder": Recorder(slot)}
    chosen: Transport
    if transport == "board":
        exchange = shared.exchange(rank, attempt=0, channel=name)
        assert exchange is not None
        chosen = SharedMemoryTransport(exchange, **common)
    else:
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
        chosen = GlooTransport(store, world_size=RANKS, **common)
    votes = VoteGroup(chosen)
    step = 0

    def start() -> None:
        nonlocal step
        step += 1
        votes.start(Vote(step=step))

    def work() -> None:
        """Compute for a fixed time, as a rank does between starting a vote and reading it."""
        until = time.perf_counter() + WORK_SECONDS
        while time.perf_counter() < until:
            compute(10)

    for _ in range(WARM_VOTES):
        start()
        votes.collect()
    back_to_back, alone, exposed, starts = [], [], [], []
    for _ in range(number * 5):
        began = time.perf_counter_ns()
        start()
        votes.collect()
        back_to_back.append((time.perf_counter_ns() - began) / 1000)
    for _ in range(number):
        work()
        began = time.perf_counter_ns()
        start()
        votes.collect()
        alone.append((time.perf_counter_ns() - began) / 1000)
    for _ in range(number):
        began = time.perf_counter_ns()
        start()
        starts.append((time.perf_counter_ns() - began) / 1000)
        work()
        began = time.perf_counter_ns()
        votes.collect()
        exposed.append((time.perf_counter_ns() - began) / 1000)
    answer.send(
        {
            f"vote, {transport}: back to back": back_to_back,
            f"vote, {transport}: read immediately, after 50 ms of work": alone,
            f"vote, {transport}: overlapped with 50 ms of work, start": starts,
            f"vote, {transport}: overlapped with 50 ms of work, remaining wait": exposed,
        }
    )
    votes.close()
    answer.recv()  # otherwise rank 0 could close its end of the group before rank 1 is done


def vote(folder: Path, number: int) -> dict[str, list[float]]:
    """Measure votes between two processes; return every sample of both ranks in microseconds."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from grpo_run.runtime.board.board import Board

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    samples: dict[str, list[float]] = {}
    for transport in ("board", "Gloo"):
        Board.create(folder / "votes.mmap", RANKS)
        ranks = [(rank, store.port, str(folder), transport, number) for rank in range(RANKS)]
        samples.update(_children(vote_rank, ranks))
    return samples


def cleanup_rank(folder: str, number: int, supervisor: int, answer: Connection) -> None:
    """Measure cleanup with and without the freeze, in a fork that has imported TRL, like a rank."""
    from grpo_run.runtime.processes.forkserver import SUPERVISOR_PID

    os.environ[SUPERVISOR_PID] = str(supervisor)
    import grpo_run.runtime.rank.preload  # noqa: F401 - the import collects garbage and freezes all objects

    context = multiprocessing.get_context("fork")
    results: dict[str, list[float]] = {}
    for frozen in (True, False):
        here, there = context.Pipe()
        child = context.Process(target=_clean, args=(folder, number, frozen, there))
        child.start()
        there.close()
        if not here.poll(CHILD_SECONDS / 2):
            raise TimeoutError("a forked rank did not finish its cleanup runs")
        results.update(here.recv())
        child.join(10)
    answer.send(results)
    answer.recv()


def _clean(folder: str, number: int, frozen: bool, answer: Connection) -> None:
    from grpo_run.runtime.board.board import Board
    from grpo_run.runtime.rank.memory.cleanup import StepCleanup
    from grpo_run.runtime.rank.memory.cleanup_policy import CleanupNeed
    from grpo_run.runtime.rank.memory.device import DeviceMemory
    from grpo_run.runtime.rank.memory.phases import ResidentMemory

    if not frozen:
        gc.unfreeze()
    shared = Board.create(Path(folder) / f"cleanup-{frozen}.mmap", 1)
    slot = shared.writer(0, rank=0, pid=os.getpid(), attempt=0)
    name = "cleanup: preloaded and frozen" if frozen else "cleanup: preloaded, not frozen"
    # The first run in a fork also copies the memory pages that it modifies.
    cleanup = StepCleanup(1, slot, DeviceMemory(), ResidentMemory(), journal=None)

    def microseconds() -> float:
        before = slot.cleanup_seconds
        cleanup.clean(1, CleanupNeed(collect=True))
        return (slot.cleanup_seconds - before) * 1e6

    first = microseconds()
    answer.send({f"{name}, first": [first], name: [microseconds() for _ in range(max(5, number // 5))]})


def _children(target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> dict[str, list[float]]:
    """Run `target` concurrently in new interpreters, with a deadline; return their results joined by name."""
    context = multiprocessing.get_context("spawn")
    ends, processes = [], []
    joined: dict[str, list[float]] = {}
    try:
        for words in arguments:
            here, there = context.Pipe()
            process = context.Process(target=target, args=(*words, there))
            process.start()
            there.close()
            ends.append(here)
            processes.append(process)
        for end in ends:
            if not end.poll(CHILD_SECONDS):
                raise TimeoutError(f"{target.__name__} did not respond within {CHILD_SECONDS:g} s")
            for name, values in end.recv().items():
                joined.setdefault(name, []).extend(values)
        for end in ends:
            end.send("done")
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(10)
    return joined


def figures(values: Sequence[float]) -> dict[str, float]:
    """Return median and 95th percentile (nearest rank) in microseconds, and the number of samples."""
    ordered = sorted(values)
    return {
        "median_us": round(statistics.median(ordered), 3),
        "p95_us": round(ordered[-(-95 * len(ordered) // 100) - 1], 3),
        "samples": len(ordered),
    }


def shown(microseconds: float) -> str:
    """Format a duration in µs or ms."""
    return f"{microseconds / 1000:.3f} ms" if microseconds >= 100 else f"{microseconds:.2f} µs"


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--number", type=machine.count, default=100,
    help="number of votes with work in between, and of batches for the rest; default 100")  # fmt: skip
    options = parser.parse_args()
    # Prevent DeepSpeed from selecting an accelerator.
    os.environ.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "DS_ACCELERATOR": "cpu"})

    console = Console()
    facts = machine.facts()
    with tempfile.TemporaryDirectory(prefix="grpo-run-micro-") as name:
        samples = {
            **board(Path(name), options.number),
            **journal(Path(name), options.number),
            **vote(Path(name), options.number),
            **_children(cleanup_rank, [(name, options.number, os.getpid())]),
        }
    summary = {name: figures(values) for name, values in samples.items()}
    rendered = Table(title="Cost of the components of a step")
    for column in ("", "median", "95th percentile", "samples"):
        rendered.add_column(column, justify="right" if column else "left")
    for name, row in summary.items():
        rendered.add_row(name, shown(row["median_us"]), shown(row["p95_us"]), str(row["samples"]))
    console.print(rendered)
    result = {
        "benchmark": "micro",
        "machine": facts,
        "settings": {"number": options.number},
        "summary": summary,
        "samples_us": {name: [round(value, 3) for value in values] for name, values in samples.items()},
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
