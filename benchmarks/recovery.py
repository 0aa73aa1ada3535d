"""Measure the time from SIGKILL of a rank until training continues, for three launchers.

All launchers run one script on two ranks with the same schedule of kills, in turn. A rank is killed between
two checkpoints. The benchmark measures the time from the signal until every rank has completed a step in a
new process ("next step"), and until every rank has passed the step that had been reached ("caught up", which
includes the repetition of lost steps). The times come from the script's step log, not from the launcher.

`--size` trains a larger model. Then most of the time until the next step is the script's own: it builds the model
and takes a step. "Beyond script and step" is what remains of it after subtracting, of the same run, the time from
the first line of `main` to `train()` in the new process, and the median of the steps before the kill.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import inf, nan
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent))

import machine
from launchers import FT_LAUNCHER, NAMES, OURS, RANKS, TORCHRUN, LauncherError, Training, install_peer
from step_log import StepEnd, StepLog, read_starts

START_SECONDS = 180.0
"""Limit from the start of a launcher, or from a recovery, to the step of the next kill."""
END_SECONDS = 60.0
"""Limit from the last recovery to the launcher's exit: a few steps and a digest of the weights."""
POLL_SECONDS = 0.002


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A scheduled kill of `rank`, `delay_seconds` after it has completed `step`."""

    number: int
    rank: int
    step: int
    delay_seconds: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Result of a kill. Durations are in seconds from the signal; None means that the event did not occur."""

    launcher: str
    number: int
    rank: int
    step: int
    next_step_seconds: float | None
    caught_up_seconds: float | None
    failure: str | None
    script_seconds: float | None = None
    """From the first line of `main` to `train()` in the new process, of the slowest rank."""
    step_seconds: float | None = None
    """Median of the steps of this run before the kill."""

    @property
    def beyond_seconds(self) -> float | None:
        """Time until the next step without the script's own part and without the step."""
        if self.next_step_seconds is None or self.script_seconds is None or self.step_seconds is None:
            return None
        return round(self.next_step_seconds - self.script_seconds - self.step_seconds, 4)


def schedule(
    kills: int, kills_per_run: int, save_steps: int, step_seconds: float, seed: int, *, ranks: int = RANKS
) -> list[list[Kill]]:
    """Return the kills of each run: random rank, step and moment, with a checkpoint between two kills.

    Kills are at least two steps away from every checkpoint, because an interrupted checkpoint is not measured
    here.
    """
    source = random.Random(seed)
    runs: list[list[Kill]] = []
    for number in range(kills):
        if number % kills_per_run == 0:
            runs.append([])
        checkpoint = (len(runs[-1]) + 1) * save_steps
        runs[-1].append(
            Kill(
                number=number,
                rank=source.randrange(ranks),
                step=checkpoint + source.randrange(2, save_steps - 2),
                delay_seconds=source.uniform(0, step_seconds),
            )
        )
    return runs


class FaultInjector:
    """Kills ranks of a run and measures its recovery.

    Args:
        training: the run.
        deadline_seconds: time after a kill at which the run counts as not recovered.
        ranks: number of ranks.
    """

    def __init__(self, training: Training, deadline_seconds: float, ranks: int = RANKS) -> None:
        self._training = training
        self._deadline_seconds = deadline_seconds
        self._logs = [StepLog(training.step_log, rank) for rank in range(ranks)]

    def kill(self, kill: Kill) -> Sample:
        """Wait for the scheduled step, kill the rank, and wait until training has caught up."""
        failure = self._until(lambda: self._reached(kill), START_SECONDS)
        if failure is not None:
            return self._sample(kill, kill.step, None, None, f"step {kill.step} not reached: {failure}")
        pids = [log.last.pid for log in self._logs if log.last is not None]
        if pids[kill.rank] not in self._training.processes():
            return self._sample(kill, kill.step, None, None, f"rank {kill.rank} exited before its kill")
        time.sleep(kill.delay_seconds)
        killed_at = time.monotonic()
        os.kill(pids[kill.rank], signal.SIGKILL)
        self._update()
        reached = max(log.last.step for log in self._logs if log.last is not None and log.last.pid in pids)

        def seconds(condition: Callable[[StepEnd], bool]) -> float | None:
            """Return the time until every rank has completed such a step in a new process."""
            new = [
                [end for end in log.ends if end.at_seconds > killed_at and end.pid not in pids]
                for log in self._logs
            ]
            firsts = [next((end.at_seconds for end in ends if condition(end)), inf) for ends in new]
            since = max(firsts) - killed_at
            return None if since == inf else round(since, 4)

        failure = self._until(
            lambda: seconds(lambda end: end.step > reached) is not None, self._deadline_seconds
        )
        next_step = seconds(lambda end: True)
        return replace(
            self._sample(kill, reached, next_step, seconds(lambda end: end.step > reached), failure),
            script_seconds=self._script_seconds(set(pids)),
            step_seconds=self._step_seconds(set(pids)),
        )

    def _script_seconds(self, killed: set[int]) -> float | None:
        """Return the time from `main` to `train()` in the processes that followed, of the slowest rank."""
        starts = [read_starts(self._training.step_log, rank) for rank in range(len(self._logs))]
        new = [log.last.pid for log in self._logs if log.last is not None and log.last.pid not in killed]
        times = [seconds for start in starts for pid, seconds in start.items() if pid in new]
        return round(max(times), 4) if times else None

    def _step_seconds(self, killed: set[int]) -> float | None:
        """Return the median duration of the killed processes' steps."""
        ends = [end for end in self._logs[0].ends if end.pid in killed]
        durations = [end.at_seconds - before.at_seconds for before, end in itertools.pairwise(ends)]
        return round(statistics.median(durations), 4) if durations else None

    def _sample(
        self, kill: Kill, step: int, next_step: float | None, caught_up: float | None, failure: str | None
    ) -> Sample:
        return Sample(
            launcher=self._training.name,
            number=kill.number,
            rank=kill.rank,
            step=step,
            next_step_seconds=next_step,
            caught_up_seconds=caught_up,
            failure=failure,
        )

    def _reached(self, kill: Kill) -> bool:
        last = self._logs[kill.rank].last
        return last is not None and last.step >= kill.step and all(log.last is not None for log in self._logs)

    def _update(self) -> None:
        for log in self._logs:
            log.update()

    def _until(self, condition: Callable[[], bool], timeout_seconds: float) -> str | None:
        """Wait for the condition. Return None if it holds, else the reason why it was not reached."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            code = self._training.ended()
            self._update()
            if condition():
                return None
            if code is not None:
                return f"the launcher exited with {code}"
            if time.monotonic() > deadline:
                return f"not within {timeout_seconds:g} s"
            time.sleep(POLL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class RunEnd:
    """The end of a run after its last kill. `digest` is the digest of the final weights."""

    launcher: str
    exit_code: int | None
    digest: str | None


def measure(
    name: str, kills: Sequence[Kill], folder: Path, options: Any, notify: Callable[[Sample], None]
) -> tuple[list[Sample], RunEnd]:
    """Perform the kills of one run; stop at the first kill from which it does not recover."""
    samples: list[Sample] = []
    last_step = (options.kills_per_run + 1) * options.save_steps + options.save_steps // 2
    arguments = [
        "--max-steps", str(last_step), "--save-steps", str(options.save_steps), "--save-total-limit", "2",
        "--step-seconds", str(options.step_seconds), "--size", str(options.size),
    ]  # fmt: skip
    with closing(Training(name, folder, arguments, restarts=len(kills), ranks=options.ranks)) as training:
        injector = FaultInjector(training, options.deadline, options.ranks)
        for kill in kills:
            samples.append(injector.kill(kill))
            notify(samples[-1])
            if samples[-1].failure is not None:
                print(training.tail(), file=sys.stderr)
                return samples, RunEnd(launcher=name, exit_code=training.ended(), digest=None)
        code = training.wait(END_SECONDS)
        digest = training.output_dir / "weights.sha256"
        return samples, RunEnd(
            launcher=name,
            exit_code=code,
            digest=digest.read_text().strip() if digest.is_file() else None,
        )


def summarize(samples: Sequence[Sample], names: Sequence[str]) -> dict[str, Any]:
    """Return median, minimum and maximum by launcher.

    No recovery counts as infinite. Compare with the best peer.
    """
    summary: dict[str, Any] = {}
    for name in names:
        own = [sample for sample in samples if sample.launcher == name]
        row: dict[str, Any] = {"kills": len(own), "recovered": sum(sample.failure is None for sample in own)}
        for field in ("next_step_seconds", "caught_up_seconds", "beyond_seconds"):
            values = [inf if getattr(sample, field) is None else getattr(sample, field) for sample in own]
            figures = {"median": statistics.median(values), "min": min(values), "max": max(values)}
            row[field] = {key: None if value == inf else value for key, value in figures.items()}
        summary[name] = row
    medians = {name: summary[name]["next_step_seconds"]["median"] for name in names}
    peers = {name: median for name, median in medians.items() if name != OURS and median is not None}
    if medians.get(OURS) and peers:
        best = min(peers, key=lambda name: peers[name])
        summary["best_peer"] = best
        summary["ours_to_best_peer"] = round(medians[OURS] / peers[best], 4)
        ours, theirs = (summary[name]["beyond_seconds"]["median"] for name in (OURS, best))
        if ours is not None and theirs:
            summary["ours_to_best_peer_beyond_script_and_step"] = round(ours / theirs, 4)
    return summary


def table(summary: dict[str, Any], names: Sequence[str], ends: Sequence[RunEnd], deadline: float) -> Table:
    """Return the table to print."""
    rendered = Table(
        title="SIGKILL of a rank: seconds until every rank has completed the next step",
        caption=f"never: not within {deadline:g} s after the kill, or the launcher gave up",
    )
    for column in (
        "launcher",
        "recovered",
        "median",
        "min",
        "max",
        "beyond script and step",
        "caught up, median",
        "runs ended well",
    ):
        rendered.add_column(column, justify="left" if column == "launcher" else "right")

    def shown(value: float | None) -> str:
        return "never" if value is None else f"{value:.2f}"

    for name in names:
        row, own = summary[name], [end for end in ends if end.launcher == name]
        rendered.add_row(
            name,
            f"{row['recovered']}/{row['kills']}",
            *(shown(row["next_step_seconds"][key]) for key in ("median", "min", "max")),
            shown(row["beyond_seconds"]["median"]),
            shown(row["caught_up_seconds"]["median"]),
            f"{sum(end.exit_code == 0 for end in own)}/{len(own)}",
        )
    return rendered


def main() -> int:
    """Measure, print, write."""
    parser = machine.argument_parser(__doc__)
    parser.add_argument("--kills", type=machine.count, default=10, help="kills per launcher; default 10")
    parser.add_argument("--kills-per-run", type=machine.count, default=5, help="kills per run; default 5")
    parser.add_argument("--launchers", default=f"{OURS},{TORCHRUN},{FT_LAUNCHER}", metavar="NAMES", help=f"comma-separated, from {', '.join(NAMES)}; default %(default)s")  # fmt: skip
    parser.add_argument(
        "--deadline", type=float, default=90.0, metavar="SECONDS", help="limit for a recovery; default 90"
    )
    parser.add_argument(
        "--save-steps", type=machine.count, default=10, help="steps between checkpoints; default 10"
    )
    parser.add_argument("--step-seconds", type=float, default=0.05, help="sleep in each step; default 0.05")
    parser.add_argument("--size", type=float, default=0.0, metavar="MILLIONS", help="parameters of the model; default: the tests' model")  # fmt: skip
    parser.add_argument("--ranks", type=machine.count, default=RANKS, help="ranks; default %(default)s")
    parser.add_argument("--seed", type=int, default=1, help="seed of the schedule of kills")
    options = parser.parse_args()
    names = list(dict.fromkeys(options.launchers.split(",")))
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"--launchers {unknown[0]}: choose from {', '.join(NAMES)}")
    if options.save_steps < 5:
        parser.error(
            "--save-steps must be at least 5, because kills are two steps away from every checkpoint"
        )
    options.kills_per_run = min(options.kills_per_run, options.kills)

    console = Console()
    facts = machine.facts()
    samples: list[Sample] = []
    ends: list[RunEnd] = []

    def notify(sample: Sample) -> None:
        outcome = (
            sample.failure
            or f"{sample.next_step_seconds:.2f} s (script {sample.script_seconds:.2f} s, step"
            f" {sample.step_seconds:.2f} s, beyond {sample.beyond_seconds:.2f} s),"
            f" caught up {sample.caught_up_seconds:.2f} s"
        )
        console.print(
            f"{sample.launcher}: kill {sample.number} of rank {sample.rank} after step {sample.step}: {outcome}",
            highlight=False,
        )

    if FT_LAUNCHER in names:
        install_peer()
    runs = schedule(
        options.kills,
        options.kills_per_run,
        options.save_steps,
        options.step_seconds,
        options.seed,
        ranks=options.ranks,
    )
    with tempfile.TemporaryDirectory(prefix="grpo-run-recovery-") as folder:
        for number, kills in enumerate(runs):
            # Rotate the order, so that no launcher always runs directly after the same other one.
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                remaining, part = list(kills), 0
                while remaining:
                    done, end = measure(
                        name, remaining, Path(folder) / f"{name}-{number}-{part}", options, notify
                    )
                    samples += done
                    ends.append(end)
                    remaining, part = remaining[len(done) :], part + 1
    summary = summarize(samples, names)
    console.print(table(summary, names, ends, options.deadline))
    if "best_peer" in summary:
        console.print(
            f"Ratio of grpo-run's median to the best peer's ({summary['best_peer']}):"
            f" {summary['ours_to_best_peer']:.2f}; beyond script and step:"
            f" {summary.get('ours_to_best_peer_beyond_script_and_step', nan):.2f}",
            highlight=False,
        )
    result = {
        "benchmark": "recovery",
        "machine": facts,
        "settings": {key: value for key, value in vars(options).items() if key != "json"},
        "summary": summary,
        "samples": [{**asdict(sample), "beyond_seconds": sample.beyond_seconds} for sample in samples],
        "runs": [asdict(end) for end in ends],
    }
    machine.finish(console, result, options.json)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LauncherError as error:
        sys.exit(f"recovery: {error}")
