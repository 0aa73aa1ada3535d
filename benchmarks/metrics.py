"""Measure what metrics cost: a scrape of 8 and of 1,024 ranks, memory of many scrapes, and a training step.

Ranks are simulated: each has written every field of its slot, phases, and memory of a GPU. A scrape is
reading the board, evaluating the catalogue and writing the page. What a step costs is what a rank writes for
metrics alone: the values that are logged, and the duration of each phase.
"""

from __future__ import annotations

import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

import msgspec
from parts import machine

from grpo_run.dashboards.metrics._collector import RunCollector
from grpo_run.runtime.board._duration_table import TABLE_BYTES, DurationTableWriter
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.events import AttemptStarted, RunStarted, StepCommitted, TrainStarted
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.status import live_status
from grpo_run.runtime.launching.reading import history_parts
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS

BOUNDS_SECONDS = {8: 0.010, 1024: 0.500}
"""Most that a scrape may take, by number of ranks."""
STEP_BOUND_SECONDS = 0.0001
PHASES = (
    Phase.data, Phase.score, Phase.generate, Phase.reward, Phase.forward_backward, Phase.optimizer,
    Phase.vote, Phase.checkpoint,
)  # fmt: skip
"""The phases of one step."""
STEPS = 200


def simulated(folder: Path, ranks: int) -> RunCollector:
    """Return the collector of a run of so many ranks on one board, in the middle of a step."""
    board = Board.create(folder / f"board-{ranks}.mmap", ranks)
    board.begin_attempt(0)
    for rank in range(ranks):
        slot = board.writer(rank, rank=rank, pid=os.getpid(), attempt=0)
        slot.state = RankState.training
        slot.train_call, slot.step, slot.voted_step, slot.tokens_generated = 1, 7, 7, 4096
        slot.log(dict.fromkeys(LOGGED_FIELDS, 0.5))
        for phase in PHASES * 2:
            slot.enter(phase)
            slot.leave(phase)
        slot.enter(Phase.generate)
        slot.publish()
        slot.memory_area.totals.has_device = 1
        for phase in PHASES:
            slot.memory_area.figures(phase).peak_allocated_bytes = 2**30
            slot.memory_area.publish(phase)
    events = [
        RunStarted(run="simulated"),
        AttemptStarted(attempt=0),
        TrainStarted(rank=0, step=0, train_call=1, target_steps=100),
        *(StepCommitted(step=step, train_call=1) for step in range(1, 8)),
    ]
    timed = (msgspec.structs.replace(event, time=float(at)) for at, event in enumerate(events))
    history = History.of(timed, history_parts())
    return RunCollector(lambda: live_status(("simulated", "running", ""), history, board))


def scrape(collector: RunCollector) -> str:
    """Return one page."""
    return collector.page()


def seconds_of(action: Callable[[], object], times: int) -> list[float]:
    """Return the CPU seconds of each call: other processes of the machine do not count."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        action()
        taken.append(time.process_time() - began)
    return taken


def memory_of_scrapes(collector: RunCollector, scrapes: int) -> dict[str, int]:
    """Return the bytes resident after a tenth of the scrapes and after all."""
    process, resident = psutil.Process(), {}
    for number in range(1, scrapes + 1):
        scrape(collector)
        if number in (scrapes // 10, scrapes):
            resident["a tenth" if number < scrapes else "all"] = process.memory_info().rss
    return resident


def step_seconds(folder: Path) -> list[float]:
    """Return what the metrics of a rank take in each of many steps."""
    board = Board.create(folder / "board-step.mmap", 1)
    slot = board.writer(0, rank=0, pid=os.getpid(), attempt=0)
    memory = bytearray(TABLE_BYTES)
    durations = DurationTableWriter(memory, 0)  # type: ignore[arg-type] # written to as to a mapping
    values = dict.fromkeys(LOGGED_FIELDS, 0.5)

    def step() -> None:
        slot.log(values)
        for phase in PHASES:
            durations.add(phase, 0.25)

    return seconds_of(step, STEPS)


def main() -> int:
    """Measure, print and compare with the bounds."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--scrapes", type=machine.count, default=10_000, metavar="N", help="for memory")
    options = parser.parse_args()
    result: dict[str, Any] = {"machine": machine.facts(), "scrapes": options.scrapes}
    console, table = Console(), Table("what", "median", "bound", "series")
    kept = True

    def add(what: str, seconds: list[float], bound: float, series: str = "") -> bool:
        median = statistics.median(seconds)
        result[what] = seconds
        table.add_row(what, f"{1000 * median:.3f} ms", f"{1000 * bound:g} ms", series)
        return median <= bound

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ranks, bound in BOUNDS_SECONDS.items():
            collector = simulated(folder, ranks)
            series = sum(not line.startswith("#") for line in scrape(collector).splitlines())
            taken = seconds_of(functools.partial(scrape, collector), 20)
            kept &= add(f"a scrape of {ranks} ranks", taken, bound, str(series))
        kept &= add("metrics of one step", step_seconds(folder), STEP_BOUND_SECONDS)
        resident = result["resident_bytes"] = memory_of_scrapes(simulated(folder, 8), options.scrapes)
    console.print(table)
    sizes = ", ".join(f"{size / 2**20:.1f} MiB after {when}" for when, size in resident.items())
    console.print(f"Resident, of {options.scrapes} scrapes: {sizes}.")
    machine.finish(console, result, options.json)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
