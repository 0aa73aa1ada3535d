"""Kill ranks of a run on a schedule, and measure its recovery from the step logs.

Used by `recovery.py` and `history.py`.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from parts.launchers import RANKS, Training
from parts.step_log import StepEnd, StepLog, read_starts

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
    name: str,
    kills: Sequence[Kill],
    folder: Path,
    options: Any,
    notify: Callable[[Sample], None],
    more_arguments: Sequence[str] = (),
) -> tuple[list[Sample], RunEnd]:
    """Perform the kills of one run; stop at the first kill from which it does not recover."""
    samples: list[Sample] = []
    last_step = (options.kills_per_run + 1) * options.save_steps + options.save_steps // 2
    arguments = [
        "--max-steps", str(last_step), "--save-steps", str(options.save_steps), "--save-total-limit", "2",
        "--step-seconds", str(options.step_seconds), "--size", str(options.size), *more_arguments,
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
            launcher=name, exit_code=code, digest=digest.read_text().strip() if digest.is_file() else None
        )
