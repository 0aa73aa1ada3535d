"""The steps of a run that is being measured: wait for one, and the mean duration of some.

Used by `overhead_in_turns.py` and `live_page.py`, which compare blocks of steps of a run that goes on.
"""

from __future__ import annotations

import statistics
import time

from parts.launchers import RANKS, LauncherError, Training
from parts.step_log import StepLog


class RunSteps:
    """The steps of one run over all ranks.

    Args:
        training: the run, just started.
        poll_seconds: between two looks.
        deadline_seconds: for one wait.
    """

    def __init__(self, training: Training, *, poll_seconds: float, deadline_seconds: float) -> None:
        self._training = training
        self._logs = [StepLog(training.step_log, rank) for rank in range(RANKS)]
        self._poll_seconds, self._deadline_seconds = poll_seconds, deadline_seconds

    def wait(self, step: int) -> None:
        """Wait until all ranks have ended a step.

        Raises:
            LauncherError: the run ended before, or took too long.
        """
        deadline = time.monotonic() + self._deadline_seconds
        while self.last() < step:
            if self._training.ended() is not None or time.monotonic() > deadline:
                raise LauncherError(
                    f"{self._training.name} did not reach step {step}:\n{self._training.tail()}"
                )
            time.sleep(self._poll_seconds)

    def last(self) -> int:
        """Return the last step that all ranks have ended."""
        for log in self._logs:
            log.update()
        return min(log.last.step if log.last is not None else 0 for log in self._logs)

    def mean_seconds(self, first: int, last: int) -> float:
        """Return the mean duration of the steps from `first` to `last` over all ranks."""
        ends = [{end.step: end.at_seconds for end in log.ends} for log in self._logs]
        return statistics.mean((one[last] - one[first - 1]) / (last - first + 1) for one in ends)
