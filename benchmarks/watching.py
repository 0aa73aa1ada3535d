"""Measure the CPU time of watching: of the supervisor, of the processes it needs, and of eight ranks that
wait.

One window in each state of a real run with eight ranks, all with the metrics exporter on and scraped every 15
s:

    asleep       every rank is in one reward phase of a minute
    waiting      seven ranks wait in a collective for one that is a minute late: records are read now and then
    stepping     a series of short steps; once more on a terminal, with a progress line
    uneven       one rank is a second late in every step
    computing    forward and backward passes of seconds
    saving       a checkpoint in every step: snapshots are taken and drained all the time
    stopped      one rank is stopped by a signal, a possible hang: threads and connections are looked at

In states in which the ranks do nothing, their CPU time is the guard's: heartbeats, and answers of the worker
servers. All figures are fractions of one core.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine

from grpo_run.runtime.board.board import Board
from grpo_run.watchdog.observation import Phase, Slot

RANKS = 8
LONG_SECONDS = 60.0
WINDOW_SECONDS = 30.0
SETTLE_SECONDS = 5.0
SCRAPE_SECONDS = 15.0
START_DEADLINE_SECONDS = 300.0
SCRIPT = Path(__file__).resolve().parent / "scripts" / "watched.py"
PATIENT = ("--deadline-floor", "300")
"""Nothing is ended within a window."""


def _in_steps(slots: list[Slot]) -> bool:
    return min(slot.step for slot in slots) >= 4


def _asleep(slots: list[Slot]) -> bool:
    return all(slot.phase is Phase.reward for slot in slots)


def _waiting(slots: list[Slot]) -> bool:
    return (
        slots[0].step == 3
        and slots[0].phase is Phase.reward
        and time.monotonic() - slots[0].phases[-1].since_seconds > 1
    )


@dataclass(frozen=True, kw_only=True)
class State:
    """A state of a run.

    Args:
        sentence: describes it in the table.
        arguments: of the script.
        begun: whether the run is in the state, from the slots of all ranks.
        options: of `grpo-run launch`.
        stopped: places of ranks that are stopped by a signal before the window.
        ranks_wait: no rank trains, so that the CPU time of the ranks is the guard's.
        on_terminal: show the progress line.
    """

    sentence: str
    arguments: tuple[str, ...]
    begun: Callable[[list[Slot]], bool] = _in_steps
    options: tuple[str, ...] = ()
    stopped: tuple[int, ...] = ()
    ranks_wait: bool = False
    on_terminal: bool = False


SHORT = ("--max-steps", "5000", "--step-seconds", "0.05")
LATE = ("--max-steps", "8", "--late-from", "4", "--late-seconds", str(LONG_SECONDS))
STATES = {
    "asleep": State(
        sentence="all asleep in one phase of a minute",
        arguments=("--max-steps", "4", "--step-seconds", str(LONG_SECONDS)),
        begun=_asleep, options=PATIENT, ranks_wait=True,
    ),
    "waiting": State(
        sentence="seven wait in a collective for one, a minute", arguments=LATE, begun=_waiting,
        options=PATIENT, ranks_wait=True,
    ),
    "stepping": State(sentence="short steps", arguments=SHORT),
    "terminal": State(sentence="short steps, on a terminal", arguments=SHORT, on_terminal=True),
    "uneven": State(
        sentence="one rank a second late in every step",
        arguments=("--max-steps", "5000", "--late-seconds", "1"),
    ),
    "computing": State(
        sentence="forward and backward passes of seconds",
        arguments=("--max-steps", "5000", "--forward-seconds", "2"),
    ),
    "saving": State(
        sentence="a checkpoint in every step of half a second",
        arguments=("--max-steps", "5000", "--step-seconds", "0.5", "--save-steps", "1", "--save-total-limit",
        "2"),
    ),
    "stopped": State(
        sentence="one rank stopped by a signal", arguments=SHORT, options=PATIENT, stopped=(0,),
        ranks_wait=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Window:
    """CPU time in one window, as fractions of one core.

    `helpers` are the supervisor's own processes beside it: guardian, forkserver and drain worker. `ranks` is
    None if the ranks trained.
    """

    state: str
    seconds: float
    supervisor: float
    helpers: float
    ranks: float | None
    load_average: float


class WatchedRun:
    """A supervised run with eight ranks."""

    def __init__(self, folder: Path, state: State) -> None:
        self.directory = folder / "run"
        self._metrics = f"127.0.0.1:{_free_port()}"
        self._ended = threading.Event()
        save = () if "--save-steps" in state.arguments else ("--save-steps", "100000")
        self._screen, output = (
            pty.openpty()
            if state.on_terminal
            else (None, os.open(folder / "output", os.O_WRONLY | os.O_CREAT))
        )
        try:
            self.process = subprocess.Popen(
                [
                    str(Path(sys.executable).parent / "grpo-run"), "launch", "--run-dir", str(self.directory),
                    "--metrics-addr", self._metrics, *state.options, "--nproc-per-node", str(RANKS),
                    str(SCRIPT),
                    "--output-dir", str(folder / "out"), *save, *state.arguments,
                ],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
                "TERM": "xterm"},
                cwd=folder, stdout=output, stderr=output, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        finally:
            os.close(output)
        for work in (self._scrape, self._read_screen):
            threading.Thread(target=work, daemon=True).start()

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

    def measure(self, state: State, slots: list[Slot]) -> Window:
        """Measure the CPU time in one window."""
        for place in state.stopped:
            os.kill(slots[place].pid, signal.SIGSTOP)
        time.sleep(SETTLE_SECONDS)
        ranks = {slot.pid for slot in slots}
        helpers = [
            child.pid
            for child in psutil.Process(self.process.pid).children(recursive=True)
            if child.pid not in ranks and not _descends(child, ranks)
        ]
        groups = ([self.process.pid], helpers, list(ranks))
        began, before = time.monotonic(), [_cpu_seconds(pids) for pids in groups]
        time.sleep(WINDOW_SECONDS)
        seconds, after = time.monotonic() - began, [_cpu_seconds(pids) for pids in groups]
        supervisor, beside, trained = ((b - a) / seconds for a, b in zip(before, after, strict=True))
        if self.process.poll() is not None:
            raise SystemExit(f"the run has ended within the window; see {self.directory}")
        return Window(
            state=state.sentence,
            seconds=seconds,
            supervisor=supervisor,
            helpers=beside,
            ranks=trained if state.ranks_wait else None,
            load_average=round(os.getloadavg()[0], 2),
        )

    def end(self) -> None:
        """Kill the run; its result is not needed."""
        self._ended.set()
        self.process.kill()
        self.process.wait(30)

    def _scrape(self) -> None:
        while not self._ended.wait(SCRAPE_SECONDS):
            with contextlib.suppress(OSError):  # the exporter may not have been started yet
                urllib.request.urlopen(f"http://{self._metrics}/metrics", timeout=10).read()

    def _read_screen(self) -> None:
        with contextlib.suppress(OSError):  # the run has ended
            while self._screen is not None and os.read(self._screen, 65536):
                pass


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _descends(process: psutil.Process, ranks: set[int]) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return any(parent.pid in ranks for parent in process.parents())
    return False


def _cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time so far, in nanoseconds' resolution (clock_getcpuclockid(3))."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has exited
            total += time.clock_gettime((~pid << 3) | 2)
    return total


def main() -> None:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES), help="default: all")
    options = parser.parse_args()
    facts = machine.facts()
    windows = []
    for name in options.states:
        with tempfile.TemporaryDirectory() as folder:
            run = WatchedRun(Path(folder), STATES[name])
            try:
                windows.append(run.measure(STATES[name], run.until(STATES[name].begun)))
            finally:
                run.end()
    table = Table(title=f"{RANKS} ranks, fractions of one core")
    for heading in ("state", "supervisor", "its other processes", "all processes of the ranks", "load"):
        table.add_column(heading)
    for window in windows:
        ranks = "not counted: the ranks train" if window.ranks is None else f"{window.ranks:.2%}"
        table.add_row(
            window.state, f"{window.supervisor:.2%}", f"{window.helpers:.2%}", ranks, str(window.load_average)
        )
    console = Console()
    console.print(table)
    machine.finish(
        console, {"machine": facts, "windows": [asdict(window) for window in windows]}, options.json
    )


if __name__ == "__main__":
    main()
