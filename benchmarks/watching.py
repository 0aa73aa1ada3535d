"""Measure the CPU time of watching: of the supervisor, and of eight idle ranks.

Three windows, each entirely within one state of a real run with eight ranks:

    asleep     every rank is in one reward phase of 30 s
    waiting    seven ranks wait in a collective for one that is 30 s late, so that collective records are polled
    stepping   a series of short steps

In the first two states the script is idle, so the CPU time of the ranks is the guard's: heartbeats, and
responses of the worker servers. In the third state only the supervisor is measured. All figures are fractions
of one core.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import Phase, Slot

RANKS = 8
LONG_SECONDS = 30.0
WINDOW_SECONDS = 20.0
SETTLE_SECONDS = 2.0
START_DEADLINE_SECONDS = 300.0
SCRIPT = Path(__file__).resolve().parent.parent / "tests" / "scripts" / "grpo.py"


@dataclass(frozen=True, kw_only=True)
class Window:
    """CPU time in one window, as fractions of one core."""

    state: str
    seconds: float
    supervisor: float
    ranks: float | None


class WatchedRun:
    """A supervised run with eight ranks."""

    def __init__(self, folder: Path, words: Sequence[str], arguments: Sequence[str]) -> None:
        self.directory = folder / "run"
        with open(folder / "output", "wb") as output:
            self.process = subprocess.Popen(
                [
                    str(Path(sys.executable).parent / "grpo-run"), "launch", "--run-dir", str(self.directory),
                    "--metrics-addr", "off", *words, "--nproc-per-node", str(RANKS), str(SCRIPT),
                    "--output-dir", str(folder / "out"), "--save-steps", "1000", *arguments,
                ],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
                cwd=folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def until(self, condition: Callable[[list[Slot]], bool]) -> list[Slot]:
        """Wait until the slots of all ranks satisfy `condition`, and return the slots."""
        deadline = time.monotonic() + START_DEADLINE_SECONDS
        while time.monotonic() < deadline and self.process.poll() is None:
            if (self.directory / "board.mmap").exists():
                slots = [slot for slot in Board.open(self.directory / "board.mmap").read_all() if slot]
                if len(slots) == RANKS and condition(slots):
                    return slots
            time.sleep(0.05)
        raise SystemExit(f"the run did not reach the required state; see {self.directory}")

    def measure(self, state: str, slots: list[Slot], *, with_ranks: bool) -> Window:
        """Measure the CPU time in one window."""
        supervisor, ranks = psutil.Process(self.process.pid), [psutil.Process(slot.pid) for slot in slots]
        time.sleep(SETTLE_SECONDS)
        began = time.monotonic()
        before = _cpu_seconds([supervisor]), _cpu_seconds(ranks)
        time.sleep(WINDOW_SECONDS)
        seconds = time.monotonic() - began
        after = _cpu_seconds([supervisor]), _cpu_seconds(ranks)
        return Window(
            state=state,
            seconds=seconds,
            supervisor=(after[0] - before[0]) / seconds,
            ranks=(after[1] - before[1]) / seconds if with_ranks else None,
        )

    def end(self) -> None:
        """Kill the run; its result is not needed."""
        self.process.kill()
        self.process.wait(30)


def _cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def asleep(folder: Path) -> Window:
    """Measure while all ranks are in a phase of 30 s."""
    run = WatchedRun(folder, [], ["--max-steps", "4", "--step-seconds", str(LONG_SECONDS)])
    try:
        slots = run.until(lambda slots: all(slot.phase is Phase.reward for slot in slots))
        return run.measure("all asleep in one phase of 30 s", slots, with_ranks=True)
    finally:
        run.end()


def waiting(folder: Path) -> Window:
    """Measure while seven ranks wait for one."""
    injected = [
        "--deadline-floor",
        "300",
        "--inject",
        f"slow@rank0:step4:phase=reward:seconds={LONG_SECONDS}",
    ]
    run = WatchedRun(folder, injected, ["--max-steps", "8"])
    try:
        slots = run.until(
            lambda slots: (
                slots[0].step == 3
                and slots[0].phase is Phase.reward
                and time.monotonic() - slots[0].phases[-1].since_seconds > 1
            )
        )
        return run.measure("seven wait in a collective for one, 30 s", slots, with_ranks=True)
    finally:
        run.end()


def stepping(folder: Path) -> Window:
    """Measure during short steps."""
    run = WatchedRun(folder, [], ["--max-steps", "2000", "--step-seconds", "0.05"])
    try:
        slots = run.until(lambda slots: min(slot.step for slot in slots) >= 5)
        return run.measure("short steps", slots, with_ranks=False)
    finally:
        run.end()


def main() -> None:
    """Run the benchmark, and print and write the results."""
    options = machine.argument_parser(__doc__).parse_args()
    facts = machine.facts()
    windows = []
    for state in (asleep, waiting, stepping):
        with tempfile.TemporaryDirectory() as folder:
            windows.append(state(Path(folder)))
    table = Table(title=f"{RANKS} ranks, fractions of one core")
    for heading in ("state", "supervisor", "all processes of the ranks"):
        table.add_column(heading)
    for window in windows:
        ranks = "not counted: the ranks train" if window.ranks is None else f"{window.ranks:.2%}"
        table.add_row(window.state, f"{window.supervisor:.2%}", ranks)
    console = Console()
    console.print(table)
    machine.finish(
        console, {"machine": facts, "windows": [asdict(window) for window in windows]}, options.json
    )


if __name__ == "__main__":
    main()
