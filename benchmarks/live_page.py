"""Measure what the live page costs a run: the mean step while pages are open, compared with the same run
while the server and its readers are stopped.

One run trains all the time. Every twenty steps the server of `grpo-run serve` and the process that holds the
readers are stopped or continued (SIGSTOP, SIGCONT), in the order A B, B A. The steps in which they were are
not counted. The readers have the lowest priority, because they stand for other machines.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parent))

from overhead import CALIBRATION_STEPS, measure_run
from overhead_in_turns import said
from parts import machine
from parts.interval import median_interval
from parts.launchers import OURS, TORCHRUN, LauncherError, Training
from parts.padding import NO_PADDING, padding_for, unit_seconds
from parts.run_steps import RunSteps

STEP_SECONDS = 0.1
BLOCK_STEPS = 20
UNCOUNTED_STEPS = 2
POLL_SECONDS = 0.01
BLOCK_DEADLINE_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Mean step times of two neighboring blocks, in seconds."""

    read_first: bool
    read_seconds: float
    alone_seconds: float

    @property
    def ratio(self) -> float:
        """With readers to without."""
        return self.read_seconds / self.alone_seconds


@contextmanager
def served(run: Path, readers: int, folder: Path) -> Iterator[list[int]]:
    """Serve a run to so many readers; yield the processes of the server and the readers."""
    command = [sys.executable, "-P", "-m", "grpo_run.cli.main", "serve", str(run), "--address", "127.0.0.1:0"]
    environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state")}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    holder: subprocess.Popen[str] | None = None
    try:
        assert server.stdout is not None
        found = re.search(r"http://\S+", server.stdout.readline())
        if found is None:
            raise LauncherError("grpo-run serve has not started")
        words = [sys.executable, "-P", __file__, "--read", found[0], "--readers", str(readers)]
        holder = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "connected":
            raise LauncherError("the readers could not connect")
        yield [server.pid, holder.pid]
    finally:
        for process in (holder, server):
            if process is not None:
                process.kill()
                process.wait()


def read(url: str, readers: int) -> None:
    """Hold so many streams open, and read what comes; run in a process of its own."""
    os.nice(19)
    parts = urlsplit(url)
    request = f"GET {parts.path}events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    connections = []
    for _ in range(readers):
        connection = socket.create_connection((parts.hostname or "", parts.port or 0))
        connection.sendall(request)
        if not connection.recv(64).startswith(b"HTTP/1.1 200"):
            sys.exit("refused")
        connections.append(connection)

    def drain(connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            pass

    threads = [threading.Thread(target=drain, args=(one,), daemon=True) for one in connections]
    for thread in threads:
        thread.start()
    print("connected", flush=True)
    for thread in threads:
        thread.join()


def measure(folder: Path, pairs: int, readers: int, padding: list[str]) -> list[Pair]:
    """Train one run, and return the pairs of its blocks."""
    steps = 3 * BLOCK_STEPS + 2 * pairs * (BLOCK_STEPS + 2 * UNCOUNTED_STEPS)
    arguments = ["--max-steps", str(steps), "--no-save", *padding]
    measured = []
    with closing(Training(OURS, folder / "training", arguments)) as training:
        log = RunSteps(training, poll_seconds=POLL_SECONDS, deadline_seconds=BLOCK_DEADLINE_SECONDS)
        log.wait(BLOCK_STEPS)
        with served(folder / "training" / "run", readers, folder) as processes:
            for number in range(pairs):
                means = {}
                for with_readers in (True, False) if number % 2 == 0 else (False, True):
                    for pid in processes:
                        os.kill(pid, signal.SIGCONT if with_readers else signal.SIGSTOP)
                    first = log.last() + UNCOUNTED_STEPS + 1
                    last = first + BLOCK_STEPS - 1
                    log.wait(last)
                    means[with_readers] = log.mean_seconds(first, last)
                measured.append(
                    Pair(read_first=number % 2 == 0, read_seconds=means[True], alone_seconds=means[False])
                )
    return measured


def main() -> int:
    """Run the benchmark, and print and write the results."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--pairs", type=machine.count, default=40, help="pairs of blocks; default 40")
    parser.add_argument("--readers", type=machine.count, default=100, help="open pages; default 100")
    parser.add_argument("--read", metavar="URL", help="only hold the readers; used by the benchmark itself")
    options = parser.parse_args()
    if options.read is not None:
        read(options.read, options.readers)
        return 0
    console = Console()
    with tempfile.TemporaryDirectory(prefix="grpo-run-live-page-") as name:
        folder = Path(name)
        bare = measure_run(TORCHRUN, folder / "calibration", CALIBRATION_STEPS, NO_PADDING).step_seconds
        padding = padding_for(STEP_SECONDS, bare, unit_seconds())
        pairs = measure(folder, options.pairs, options.readers, padding.arguments)
    ratio = median_interval([pair.ratio for pair in pairs])
    step = statistics.mean(pair.alone_seconds for pair in pairs)
    console.print(
        f"Mean step of {step * 1000:.0f} ms with {options.readers} open pages, compared with none:"
        f" ratio {said(ratio)}, over {len(pairs)} pairs of blocks",
        highlight=False,
    )
    result: dict[str, Any] = {
        "benchmark": "live_page",
        "machine": machine.facts(),
        "settings": {"pairs": options.pairs, "readers": options.readers, "padding": asdict(padding)},
        "summary": {"ratio": asdict(ratio)},
        "samples": [asdict(pair) for pair in pairs],
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"live_page: {error}")
