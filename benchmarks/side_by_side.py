"""Compare launchers under a fault a minute: what is lost at each, and what is left of the undisturbed pace.

Each launcher trains for some minutes, one after the other. A rank is killed (SIGKILL) half a minute after the
first step, and then every minute; `--every` changes both. From the step logs, which the script writes:

- *step*: mean seconds of a step before the first kill.
- *detected*: from the signal until no process of the killed attempt is left, so that the next can begin;
  torchft has no such moment, because the other replica goes on.
- *caught up*: from the signal until a step ends that is higher than all before.
- *lost*: steps that are done again.
- *goodput*: steps at the end, in percent of those that the pace before the first kill would have given.

grpo-run, torchrun, accelerate and ft_launcher train the GRPO script of `recovery.py` on two ranks; torchft
trains a loop of its own on two replicas, since it cannot train a script as it is.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

from parts import machine
from parts.launchers import (
    ACCELERATE,
    FT_LAUNCHER,
    OURS,
    TORCHFT,
    TORCHRUN,
    LauncherError,
    Training,
    install_peer,
)
from parts.step_log import StepLog

LAUNCHERS = (OURS, TORCHRUN, ACCELERATE, FT_LAUNCHER, TORCHFT)
RANKS = 2
START_SECONDS = 180.0
POLL_SECONDS = 0.005
WARM_STEPS = 5


@dataclass(kw_only=True)
class Result:
    """What one launcher did. Durations in seconds; None for what did not happen."""

    launcher: str
    step_seconds: float = 0.0
    goodput: float = 0.0
    kills: int = 0
    detected: list[float | None] = field(default_factory=list)
    caught_up: list[float | None] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    failure: str = ""


class Watched:
    """A run with its step logs."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.logs = [StepLog(training.step_log, rank) for rank in range(RANKS)]

    def update(self) -> None:
        """Read what was logged, and note the processes."""
        for log in self.logs:
            log.update()

    @property
    def highest(self) -> int:
        """The highest step that has ended on all ranks that train."""
        return max((end.step for log in self.logs for end in log.ends), default=0)

    def until(self, at_seconds: float) -> bool:
        """Wait until a moment; return whether the launcher still runs."""
        while time.monotonic() < at_seconds:
            if self.training.ended() is not None:
                return False
            time.sleep(POLL_SECONDS)
        self.update()
        return True


def kill(run: Watched, result: Result, rank: int, limit_seconds: float) -> bool:
    """Kill a rank and measure what follows; return whether training goes on."""
    run.update()
    attempt = {log.last.pid for log in run.logs if log.last is not None}
    last = run.logs[rank].last
    assert last is not None
    before = run.highest
    began = time.monotonic()
    os.kill(last.pid, signal.SIGKILL)
    result.kills += 1
    detected: float | None = None
    while (passed := time.monotonic() - began) < limit_seconds:
        if detected is None and result.launcher != TORCHFT and not any(map(alive, attempt)):
            detected = passed
        run.update()
        new = [end for log in run.logs for end in log.ends if end.at_seconds > began]
        higher = [end.at_seconds for end in new if end.step > before]
        if higher and (result.launcher == TORCHFT or {end.pid for end in new} - attempt):
            result.detected.append(detected)
            result.caught_up.append(min(higher) - began)
            first = next((end for end in new if end.pid not in attempt), None)
            result.lost.append(0 if first is None or result.launcher == TORCHFT else before + 1 - first.step)
            return True
        if run.training.ended() is not None:
            break
        time.sleep(POLL_SECONDS)
    result.detected.append(detected)
    result.caught_up.append(None)
    result.failure = f"not recovered from kill {result.kills} within {passed:.0f} s"
    return False


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def measure(name: str, folder: Path, minutes: float, every: float, step_seconds: float, seed: int) -> Result:
    """Train under one launcher, and kill."""
    result = Result(launcher=name)
    source = random.Random(seed)
    arguments = ["--max-steps", "1000000", "--save-steps", "20", "--save-total-limit", "2",
                 "--step-seconds", str(step_seconds)]  # fmt: skip
    with closing(Training(name, folder, arguments, restarts=1000)) as training:
        run = Watched(training)
        deadline = time.monotonic() + START_SECONDS
        while min((len(log.ends) for log in run.logs), default=0) < WARM_STEPS:
            run.update()
            if time.monotonic() > deadline or training.ended() is not None:
                print(training.tail(), file=sys.stderr)
                result.failure = "did not start"
                return result
            time.sleep(POLL_SECONDS)
        began, begun_at = time.monotonic(), run.highest
        for number in range(max(1, round(minutes * 60 / every))):
            if not run.until(began + (number + 0.5) * every):
                result.failure = "the launcher ended"
                break
            if number == 0:
                result.step_seconds = (time.monotonic() - began) / max(run.highest - begun_at, 1)
            if not kill(run, result, source.randrange(RANKS), every):
                print(training.tail(), file=sys.stderr)
                break
        run.until(began + minutes * 60)
        possible = minutes * 60 / result.step_seconds if result.step_seconds else 0
        result.goodput = (run.highest - begun_at) / possible if possible else 0.0
    return result


def table(results: list[Result]) -> Table:
    """Return the table to print."""
    rendered = Table(title="A rank is killed every so often, two ranks")
    for column in (
        "launcher",
        "step, s",
        "recovered",
        "detected, s",
        "caught up, s",
        "lost steps",
        "goodput",
    ):
        rendered.add_column(column, justify="left" if column == "launcher" else "right")

    def median(values: list[float | None]) -> str:
        known = [value for value in values if value is not None]
        return f"{statistics.median(known):.2f}" if known else "-"

    for one in results:
        lost = f"{statistics.median(one.lost):g}" if one.lost else "-"
        recovered = sum(value is not None for value in one.caught_up)
        rendered.add_row(
            one.launcher, f"{one.step_seconds:.3f}", f"{recovered}/{one.kills}", median(one.detected),
            median(one.caught_up), lost, one.failure or f"{100 * one.goodput:.1f} %",
        )  # fmt: skip
    return rendered


def main() -> int:
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="for each launcher; default 4")
    parser.add_argument("--every", type=float, default=60.0, metavar="SECONDS", help="between two kills")
    parser.add_argument("--launchers", default=",".join(LAUNCHERS), metavar="NAMES")
    parser.add_argument("--step-seconds", type=float, default=0.2, help="sleep in each step; default 0.2")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    names = options.launchers.split(",")
    if unknown := [name for name in names if name not in LAUNCHERS]:
        parser.error(f"--launchers {unknown[0]}: choose from {', '.join(LAUNCHERS)}")
    console = Console(width=110)
    facts = machine.facts()
    if {FT_LAUNCHER, TORCHFT} & set(names):
        install_peer()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="grpo-run-side-by-side-") as folder:
        for name in names:
            results.append(
                measure(name, Path(folder) / name, options.minutes, options.every, options.step_seconds,
                        options.seed)
            )  # fmt: skip
            console.print(results[-1])
    console.print(table(results))
    found = {"benchmark": "side_by_side", "machine": facts, "results": [asdict(one) for one in results]}
    machine.finish(console, found, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"side_by_side: {error}")
