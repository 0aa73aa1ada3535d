"""Start real runs, wait for events in their journals, and inject faults by rank and step.

A test addresses a rank of the current attempt and a committed step from the journal; nothing sleeps for a
guessed time. Every wait has a deadline and fails with the end of the run's output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo_run.cli.main import main
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.snapshots.ownership import recorded_areas
from grpo_run.watchdog.observation import Phase
from support import warm
from support.journal import record_reader
from support.warm import QUIET

SCRIPTS = Path(__file__).parent.parent / "scripts"
CONFIGS = Path(__file__).parent.parent / "configs"
BIN = Path(sys.executable).parent
WITH_SCRIPTS = {"PYTHONPATH": str(SCRIPTS)}
"""Environment of scripts elsewhere that import what is beside those of the tests."""


class Run:
    """One run directory and the supervisors started on it.

    Args:
        folder: of the test.
        arguments: of `grpo-run launch`.
        name: of the run directory.
        environment: further variables.
        cwd: working directory, the folder by default.
        metrics: `--metrics-addr`.
        program: started in place of `grpo-run`.
        cold: whether it starts cold; None if the environment decides.
        mode: parallelism mode of `tests/configs`, for which the working directory is the repository.
    """

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        name: str = "run",
        environment: dict[str, str] | None = None,
        cwd: Path | None = None,
        metrics: str = "off",
        program: Sequence[str] = (str(BIN / "grpo-run"),),
        cold: bool | None = None,
        mode: str = "",
    ) -> None:
        if mode:  # paths of DeepSpeed files in the configurations are relative to the repository
            arguments = ["--accelerate-config", str(CONFIGS / f"{mode}.yaml"), *arguments]
            cwd = CONFIGS.parent.parent
        if mode == "fsdp2":  # through the scripts' shim, which the launcher cannot detect on CPU
            program = special("fsdp_on_cpu")
            environment = {**(environment or {}), "TEST_FSDP_ON_CPU": "1"}
        self.cold = cold
        self.inside = 0
        """A process whose namespaces the supervisor enters; see `warm.start`."""
        self.program = tuple(program)
        self.cwd = cwd or folder
        self.metrics = metrics
        self.folder = folder
        self.directory = folder / name
        self.seen_as = self.directory
        """The run directory on the command line."""
        self.arguments = list(arguments)
        self.output = folder / f"{name}.out"
        self.environment = {**os.environ, **QUIET, **(environment or {})}
        self._process: warm.Process | None = None
        self._reader = record_reader(self.directory / "journal.jsonl")
        self._records: list[dict[str, Any]] = []

    @property
    def process(self) -> warm.Process:
        """The supervisor that was started last."""
        assert self._process is not None, "the run was not started"
        return self._process

    def start(self, output: int | None = None) -> Run:
        """Start or resume the run.

        Args:
            output: descriptor that receives what the supervisor prints; the run's `.out` file by default.
        """
        with open(self.output, "ab") as file:
            self._process = warm.start(
                [
                    *self.program, "launch", "--run-dir", str(self.seen_as), "--metrics-addr", self.metrics,
                    "--show-ranks", "0",
                    *self.arguments,
                ],
                cwd=self.cwd, environment=self.environment, stdout=file if output is None else output,
                cold=self.cold, inside=self.inside,
            )  # fmt: skip
        return self

    def resume(self, directory: Path) -> Run:
        """Continue the run of a directory with `grpo-run resume`, from another working directory."""
        with open(self.output, "ab") as file:
            self._process = warm.start(
                [*self.program, "resume", str(directory)],
                cwd=Path("/"), environment=self.environment, stdout=file, cold=self.cold,
            )  # fmt: skip
        return self

    def wait(self, timeout_seconds: float = 120.0) -> int:
        """Wait for the supervisor and return its exit code."""
        try:
            return self.process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            self.close()
            raise AssertionError(f"no exit within {timeout_seconds} s:\n{self.tail()}") from None

    def ended(self, code: int = 0, *, timeout_seconds: float = 240.0) -> Run:
        """Wait for the supervisor, which must exit with this code; return the run."""
        found = self.wait(timeout_seconds)
        assert found == code, f"exit code {found}, not {code}:\n{self.tail()}"
        return self

    def send_signal(self, number: int) -> None:
        """Send a signal to the supervisor."""
        self.process.send_signal(number)

    def stopped(self, after: int) -> Run:
        """Start, stop by SIGTERM after so many steps, and wait for the end; see `held`."""
        with self.held(after):
            self.start().until_step(after)
            self.send_signal(signal.SIGTERM)
            self.until_event("stop_requested")
        return self.ended(75)

    def close(self) -> None:
        """Kill the supervisor and remove staged snapshots; for finalizers."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(10)
        with contextlib.suppress(OSError, ValueError):  # it has not begun
            for area in recorded_areas(json.loads((self.directory / "run.json").read_bytes())):
                shutil.rmtree(area, ignore_errors=True)

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return the journal's events, or those of one name."""
        self._records += self._reader.new()
        return [record for record in self._records if name in (None, record["event"])]

    def until(self, condition: Callable[[list[dict[str, Any]]], Any], timeout_seconds: float = 60.0) -> Any:
        """Wait until `condition` returns something true for the journal's events; return that."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            if found := condition(self.events()):
                return found
            ended = self._process is not None and self._process.poll() is not None
            if time.monotonic() > deadline or ended:
                if found := condition(self.events()):
                    return found
                raise AssertionError(
                    f"condition not met ({'run ended' if ended else 'deadline'}):\n{self.tail()}"
                )
            time.sleep(0.01)

    def until_event(
        self, name: str, *, count: int = 1, timeout_seconds: float = 60.0, **fields: Any
    ) -> dict[str, Any]:
        """Wait until `count` events have this name and these fields; return the first of them."""

        def found(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
            named = [event for event in events if {"event": name, **fields}.items() <= event.items()]
            return named[:1] if len(named) >= count else []

        first: dict[str, Any] = self.until(found, timeout_seconds)[0]
        return first

    def until_step(self, step: int, *, train_call: int = 1, timeout_seconds: float = 60.0) -> None:
        """Wait until `step` of a `train()` call is committed in the current attempt."""

        def reached(events: list[dict[str, Any]]) -> bool:
            attempt = self._attempt(events)
            return any(
                event["event"] == "step_committed"
                and event["attempt"] == attempt
                and (event["train_call"], event["step"]) >= (train_call, step)
                for event in events
            )

        self.until(reached, timeout_seconds)

    @staticmethod
    def _attempt(events: list[dict[str, Any]]) -> int:
        return max((event["attempt"] for event in events if event["event"] == "attempt_started"), default=-1)

    @contextlib.contextmanager
    def held(self, after: int) -> Iterator[Callable[[int], None]]:
        """Let ranks take `after` steps and no more meanwhile, so that a run has not finished when something
        is done to it. Yields a function that sets another number.

        For scripts that call `tiny.pause` once in each step; the ranks of every attempt count from its first
        step.
        """
        hold = self.cwd / "hold"

        def let(steps: int) -> None:
            partial = self.cwd / "hold.partial"
            partial.write_text(str(steps))
            partial.replace(hold)  # a rank that reads an empty file goes on

        let(after)
        try:
            yield let
        finally:
            hold.unlink()

    def pid(self, rank: int) -> int:
        """Return the pid of a rank in the current attempt."""
        events = self.events()
        attempt = self._attempt(events)
        pids = [
            e["pid"]
            for e in events
            if e["event"] == "rank_started" and e["attempt"] == attempt and e["rank"] == rank
        ]
        assert pids, f"rank {rank} has not started:\n{self.tail()}"
        return int(pids[0])

    def until_phase(self, rank: int, phase: Phase) -> None:
        """Wait until a rank is seen in a phase."""

        def inside(events: list[dict[str, Any]]) -> bool:
            slot = Board.open(self.directory / "board.mmap").read(rank)
            return slot is not None and slot.phase is phase

        self.until(inside)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a rank a signal, SIGKILL by default."""
        os.kill(self.pid(rank), number)

    def verdicts(self) -> list[dict[str, Any]]:
        """Return the verdict of each incident, oldest first."""
        folders = sorted((self.directory / "incidents").iterdir())
        return [json.loads((folder / "verdict.json").read_text()) for folder in folders]

    def command(self, name: str, *options: str) -> str:
        """Return what another command of `grpo-run` prints for this run; it must succeed."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main([name, str(self.directory), *options]) == 0, printed.getvalue()
        return printed.getvalue()

    def status(self) -> dict[str, Any]:
        """Return what `grpo-run status --json` prints."""
        value: dict[str, Any] = json.loads(self.command("status", "--json"))
        return value

    def printed(self) -> str:
        """Return the run's output, to look for something in it."""
        return self.output.read_text(errors="replace") if self.output.exists() else ""

    def tail(self, characters: int = 6000) -> str:
        """Return the end of the run's output, for the message of a failure."""
        return self.printed()[-characters:] or "(no output)"


def special(*how: str) -> tuple[str, ...]:
    """Return the program of a run that `special_launch.py` starts in this way."""
    return (sys.executable, "-P", str(Path(__file__).with_name("special_launch.py")), *how)


Runs = Callable[..., Run]
"""The fixture `runs`: makes runs in the folder of a test, with the arguments of `Run` after it."""


def digest(output_dir: Path) -> str:
    """Return the sha256 of the final weights, which the scripts write."""
    return (output_dir / "weights.sha256").read_text().split()[0]


def before_training(script: Path, code: str) -> None:
    """Write `grpo.py` with this code before the call that trains; it runs with `WITH_SCRIPTS` only."""
    source, training = (SCRIPTS / "grpo.py").read_text(), "    tiny.train(trainer, arguments)\n"
    assert training in source
    script.write_text(source.replace(training, code + training))


def line_of(script: str, mark: str) -> int:
    """Return the number of the only line of a script of `SCRIPTS` that ends with a comment."""
    lines = (SCRIPTS / script).read_text().splitlines()
    (number,) = (number for number, line in enumerate(lines, 1) if line.endswith(f"  # {mark}"))
    return number


def free_port() -> int:
    """Return a TCP port that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def alive(pids: Sequence[int]) -> list[int]:
    """Return those of `pids` that are running; a zombie is not."""

    def running(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return False

    return [pid for pid in pids if running(pid)]


def descendants(pid: int) -> Iterator[int]:
    """Yield every descendant of `pid`."""
    import psutil

    for child in psutil.Process(pid).children(recursive=True):
        yield child.pid
