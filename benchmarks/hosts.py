"""Lose a rank, a supervisor, a host or a cable of a run over two hosts, and measure how it goes on.

The hosts are made of namespaces (`tests/support/hosts.py`; root is needed), one rank each, and every launcher
runs the same script. Faults hit the host that does not serve the rendezvous: while it trains, when a
checkpoint begins to be written, or while the ranks come back from a killed rank. Like a scheduler, the
benchmark starts a launcher again that has failed; a killed supervisor at once, a lost host after three
seconds, with empty memory and an empty disk. The peers get torch's cure for a lost host
(`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`) and a script that resumes from its newest checkpoint.

    next step     from the fault until every rank has completed a step again
    lost          steps that were completed before the fault and done again after it
    equal         the weights are those of a run without faults, bit for bit
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(ROOT.parent / "tests")]

from parts import machine
from parts.launchers import (
    BIN,
    FT_LAUNCHER,
    OURS,
    POLL_SECONDS,
    SCRIPT,
    TORCHRUN,
    LauncherError,
    environment,
    install_peer,
)
from parts.step_log import StepLog
from support.hosts import PORT, Host, hosts, missing

LAUNCHERS = (OURS, TORCHRUN, FT_LAUNCHER)
FAULTS = ("rank", "supervisor", "host", "spare", "cut-8", "cut-60")
MOMENTS = ("training", "save", "recovery")
STEPS, SAVE_STEPS, FAULT_STEP = 24, 5, 12
AWAY_SECONDS = 3.0
MOST_STARTS = 6
START_SECONDS, END_SECONDS, EXIT_SECONDS = 120.0, 120.0, 20.0
LOOK_SECONDS = 0.01


@dataclass(kw_only=True)
class Case:
    """One fault under one launcher, and what was seen. Durations in seconds; None: it did not happen."""

    launcher: str
    fault: str
    moment: str
    next_step_seconds: float | None = None
    lost_steps: int | None = None
    codes: list[int | None] = field(default_factory=list)
    starts: int = 0
    """Of launchers, beside one of each host."""
    digest: str | None = None
    failure: str = ""


class HostTraining:
    """One run over several hosts under one launcher.

    Args:
        name: of the launcher.
        made: the hosts; the first one serves the rendezvous. With three, two have ranks.
        folder: shared by all.
    """

    def __init__(self, name: str, made: list[Host], folder: Path) -> None:
        self._name, self.hosts, self._folder = name, made, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._down: set[int] = set()
        self.starts = 0
        self.logs = [StepLog(folder / "steps", rank) for rank in range(2)]

    def start(self, number: int) -> None:
        """Start the launcher on a host."""
        self._down.discard(number)
        self.starts += 1
        host = self.hosts[number]
        with open(self._folder / f"{host.name}.txt", "ab") as output:
            self._processes[number] = subprocess.Popen(
                [*host.enter, *self._command(host)], cwd=self._folder,
                env={**environment(self._name), "TMPDIR": str(host.disk)},
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _command(self, host: Host) -> list[str]:
        common = [
            "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"node0:{PORT}", "--rdzv-id", "hosts",
        ]  # fmt: skip
        script = [
            str(SCRIPT), "--cpu", "--output-dir", "out", "--step-log", str(self._folder / "steps"),
            "--max-steps", str(STEPS), "--save-steps", str(SAVE_STEPS), "--step-seconds", "0.1",
        ]  # fmt: skip
        if self._name == OURS:
            own = ["--run-dir", f"run-{host.name}", "--run-id", "hosts", "--metrics-addr", "off"]
            return [str(BIN / "grpo-run"), "launch", *common, *own, *script]
        common += ["--monitor-interval", str(POLL_SECONDS), "--max-restarts", "10"]
        if self._name == TORCHRUN:
            return [str(BIN / "torchrun"), *common, *script, "--resume"]
        own = ["--ignore-missing-fault-tol-cfg", "--ft-enable-nic-monitor", "false"]
        return [str(install_peer() / "ft_launcher"), *common, *own, *script, "--resume"]

    def keep(self) -> None:
        """Read the step logs, and start launchers again that have failed, as a scheduler would."""
        for log in self.logs:
            log.update()
        for number, process in list(self._processes.items()):
            code = process.poll()
            if code not in (None, 0) and number not in self._down and self.starts < MOST_STARTS:
                self.start(number)

    def until(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        """Keep the run going until the condition holds.

        Raises:
            LauncherError: it does not within the time, or no launcher is left.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise LauncherError(f"{what}: not within {seconds:g} s")
            if all(one.poll() is not None for one in self._processes.values()) and not self._down:
                self.keep()
                if all(one.poll() is not None for one in self._processes.values()) and not condition():
                    raise LauncherError(f"{what}: all launchers have ended, {self.codes()}")
            self.keep()
            time.sleep(LOOK_SECONDS)

    def codes(self) -> list[int | None]:
        """Return how the launchers have ended, by host."""
        return [process.poll() for _, process in sorted(self._processes.items())]

    def finished(self) -> bool:
        """Whether both hosts with ranks have ended well."""
        return sum(code == 0 for code in self.codes()) >= 2

    def kill_rank(self) -> None:
        """Kill the rank of the second host: the process there that has its step log open.

        Raises:
            LauncherError: there is none.
        """
        space = os.readlink(f"/proc/{self.hosts[1].pid}/ns/pid")
        logs = {f"{self._folder}/steps.{rank}" for rank in range(2)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # one that ends meanwhile is none
                inside = os.readlink(f"/proc/{process.pid}/ns/pid") == space
                if inside and logs & {one.path for one in process.open_files()}:
                    process.kill()
                    return
        raise LauncherError("the second host has no rank")

    def kill_supervisor(self) -> None:
        """Kill the launcher of the second host, and start it again at once."""
        self._down.add(1)
        for child in psutil.Process(self._processes[1].pid).children():
            child.kill()
        self._processes[1].wait(10)
        self.start(1)

    def kill_host(self, *, back: bool) -> None:
        """Let the second host vanish, and come back after some seconds if `back`."""
        self._down.add(1)
        self.hosts[1].kill()
        self._processes[1].wait(10)
        if back:
            time.sleep(AWAY_SECONDS)
            self.hosts[1].boot()
            self.start(1)

    def cut(self, seconds: float) -> None:
        """Cut the second host off for some seconds."""
        self.hosts[1].cut()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.keep()
            time.sleep(LOOK_SECONDS)
        self.hosts[1].join()

    def close(self) -> None:
        """End whatever is left."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait(10)


@contextmanager
def training(name: str, folder: Path, *, spare: bool = False) -> Iterator[HostTraining]:
    """A run whose two hosts have begun to train."""
    with hosts(folder, 3 if spare else 2) as made:
        run = HostTraining(name, made, folder)
        try:
            for number in range(2):
                run.start(number)
            if spare:
                run.until(lambda: run.logs[1].last is not None, START_SECONDS, "the first step")
                run.start(2)
            yield run
        finally:
            run.close()


def await_moment(run: HostTraining, case: Case, folder: Path) -> None:
    """Wait until the fault is due."""

    def reached(step: int) -> bool:
        return all(log.last is not None and log.last.step >= step for log in run.logs)

    if case.moment == "save":
        saved = FAULT_STEP - FAULT_STEP % SAVE_STEPS
        run.until(lambda: reached(saved - 1), START_SECONDS, f"step {saved - 1}")
        names = (f"checkpoint-{saved}", f".checkpoint-{saved}")

        def begins() -> bool:
            return reached(saved) or any(path.name.startswith(names) for path in (folder / "out").iterdir())

        run.until(begins, START_SECONDS, f"the checkpoint of step {saved}")
        return
    run.until(lambda: reached(FAULT_STEP), START_SECONDS, f"step {FAULT_STEP}")
    if case.moment == "recovery":
        starts = folder / "steps.starts.0"
        begun = len(starts.read_text().splitlines())
        run.kill_rank()
        run.until(
            lambda: len(starts.read_text().splitlines()) > begun, START_SECONDS, "the start of new ranks"
        )


def measure(case: Case, folder: Path) -> None:
    """Do what a case says, and note what happens."""
    with training(case.launcher, folder, spare=case.fault == "spare") as run:
        try:
            await_moment(run, case, folder)
            reached = max(log.last.step for log in run.logs if log.last is not None)
            began_at = time.monotonic()
            if case.fault == "rank":
                run.kill_rank()
            elif case.fault == "supervisor":
                run.kill_supervisor()
            elif case.fault in ("host", "spare"):
                run.kill_host(back=case.fault == "host")
            else:
                run.cut(float(case.fault.partition("-")[2]))
            # a survivor may complete the step whose collectives are over
            since = began_at + 0.05

            def firsts() -> list[tuple[float, int]]:
                ends = [[(one.at_seconds, one.step) for one in log.ends if one.at_seconds > since]
                        for log in run.logs]  # fmt: skip
                return [found[0] for found in ends if found]

            run.until(lambda: len(firsts()) == 2, END_SECONDS, "the next step")
            at, step = max(firsts())
            case.next_step_seconds, case.lost_steps = round(at - began_at, 2), max(0, reached - step + 1)
            weights = folder / "out" / "weights.sha256"
            run.until(weights.is_file, END_SECONDS, "the last step")
            case.digest = weights.read_text().split()[0]
            run.until(run.finished, EXIT_SECONDS, "the launchers' ends after the last step")
        except LauncherError as error:
            case.failure = str(error)
        case.codes, case.starts = run.codes(), run.starts - len(run.hosts)


def undisturbed(folder: Path) -> str:
    """Return the digest of the weights of a run under torchrun without faults."""
    with training(TORCHRUN, folder) as run:
        run.until(run.finished, END_SECONDS, "the end of the undisturbed run")
    return (folder / "out" / "weights.sha256").read_text().split()[0]


def table(cases: list[Case], reference: str) -> Table:
    """Return the table to print."""
    rendered = Table(title="Two hosts of one rank: faults of the second one")
    for column in ("fault", "moment", "launcher", "next step, s", "lost", "equal", "started again", "note"):
        rendered.add_column(column)
    for case in cases:
        next_step = "never" if case.next_step_seconds is None else f"{case.next_step_seconds:.1f}"
        lost = "" if case.lost_steps is None else str(case.lost_steps)
        equal = "yes" if case.digest == reference else "no" if case.digest else "not finished"
        again = str(max(0, case.starts))
        rendered.add_row(case.fault, case.moment, case.launcher, next_step, lost, equal, again, case.failure)
    return rendered


def main() -> int:
    """Measure, print, write."""
    parser = machine.argument_parser(__doc__)
    for name, values in (("launchers", LAUNCHERS), ("faults", FAULTS), ("moments", ("training",))):
        parser.add_argument(
            f"--{name}",
            default=",".join(values),
            metavar="NAMES",
            help="comma-separated; default %(default)s",
        )
    parser.add_argument("--repeat", type=machine.count, default=1, help="of each case; default 1")
    options = parser.parse_args()
    chosen: dict[str, list[str]] = {}
    for name, known in (("launchers", LAUNCHERS), ("faults", FAULTS), ("moments", MOMENTS)):
        chosen[name] = getattr(options, name).split(",")
        if unknown := set(chosen[name]) - set(known):
            parser.error(f"--{name} {min(unknown)}: choose from {', '.join(known)}")
    if reason := missing():
        parser.error(f"hosts cannot be made here: {reason}")
    if FT_LAUNCHER in chosen["launchers"]:
        install_peer()
    console, facts, cases = Console(), machine.facts(), list[Case]()
    with tempfile.TemporaryDirectory(prefix="grpo-run-hosts-") as named:
        root = Path(named)
        (root / "undisturbed").mkdir()
        reference = undisturbed(root / "undisturbed")
        wanted = [
            (fault, moment, launcher, number)
            for number in range(options.repeat)
            for moment in chosen["moments"]
            for fault in chosen["faults"]
            for launcher in chosen["launchers"]
        ]
        for fault, moment, launcher, number in wanted:
            case = Case(launcher=launcher, fault=fault, moment=moment)
            folder = root / f"{launcher}-{fault}-{moment}-{number}"
            folder.mkdir()
            measure(case, folder)
            cases.append(case)
            console.print(asdict(case), highlight=False)
    console.print(table(cases, reference))
    result: dict[str, Any] = {
        "benchmark": "hosts",
        "machine": facts,
        "settings": chosen,
        "undisturbed": reference,
        "cases": [asdict(case) for case in cases],
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"hosts: {error}")
