"""The outcome of a run: its exit code and the sentence that explains it, set in one place.

Created by the supervisor at its start, and told how the run ends: in order (`run_end.py`), or after a failure of the
supervisor itself (`last_resort.py`). Does not decide that a run ends.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo_run.runtime.errors import EXIT_FINISHED
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes.agent import Directive
from grpo_run.runtime.processes.descriptors import DescriptorReserve
from grpo_run.runtime.record.live_history import LiveHistory
from grpo_run.runtime.record.reporter import Reporter
from grpo_run.runtime.staging.draining.drain_scheduler import DrainScheduler
from grpo_run.runtime.supervision.attempts.attempt import Attempt
from grpo_run.runtime.supervision.ending.run_end import RunEnd
from grpo_run.runtime.supervision.last_resort import LastResort
from grpo_run.runtime.supervision.lifecycle import Lifecycle, RunEvent


class Outcome:
    """How one run ends. `exit_code` is None and `sentence` empty until it has.

    Args:
        config: of the run.
        incidents: the folder of all incidents.
        live: journal and history of the run.
        reporter: for events and messages.
        lifecycle: of the run.
        reserve: descriptors for a report of the supervisor's own failure.
        drains: writes the last snapshots; None if there are none.
        interrupted: whether a stop was requested, so that the end waits for nothing.
    """

    def __init__(
        self,
        config: RunConfig,
        incidents: Path,
        *,
        live: LiveHistory,
        reporter: Reporter,
        lifecycle: Lifecycle,
        reserve: DescriptorReserve,
        drains: DrainScheduler | None,
        interrupted: Callable[[], bool],
    ) -> None:
        self.exit_code: int | None = None
        self.sentence = ""
        self._drains = drains
        self._run_end = RunEnd(
            config, live=live, reporter=reporter, lifecycle=lifecycle, drain_scheduler=drains,
            interrupted=interrupted,
        )  # fmt: skip
        self._last_resort = LastResort(
            incidents, live=live, reporter=reporter, lifecycle=lifecycle, reserve=reserve
        )

    @property
    def directive(self) -> Directive:
        """What the agent does at the end of the run."""
        return Directive.finished if self.exit_code == EXIT_FINISHED else Directive.terminate

    def end(self, event: RunEvent, exit_code: int, attempt: Attempt, sentence: str = "") -> Directive:
        """End the run in order.

        Args:
            event: for the lifecycle.
            exit_code: as decided so far; see `RunEnd.end`.
            attempt: the last one.
            sentence: how the run ended; empty to summarize its state.
        """
        self.exit_code = exit_code  # also if what follows fails
        self.exit_code, self.sentence = self._run_end.end(
            event, exit_code, sentence, step=attempt.committed[1], ranks=attempt.place_of_rank
        )
        return self.directive

    def end_after_failure(
        self, error: BaseException, attempt: Attempt, stop_jointly: Callable[[], bool]
    ) -> Directive:
        """The supervisor has failed: report it, let the ranks save and stop, and end the run.

        A run that has ended already keeps its exit code.

        Args:
            error: the failure.
            attempt: the last one.
            stop_jointly: lets the ranks save and stop, and returns whether all of them have.
        """
        step = attempt.committed[1]
        sentence = self._last_resort.report(error, step=step)
        if self.exit_code is None:
            stopped = self._last_resort.attempt("the joint stop", stop_jointly)
            self.exit_code = self._last_resort.end(
                sentence, stopped=bool(stopped), step=step, drains=self._drains
            )
            self.sentence = sentence
        return self.directive

    def report_thread(self, name: str, error: BaseException, attempt: Attempt) -> None:
        """Report that a thread of the supervisor has ended with an exception. The run goes on without it."""
        self._last_resort.report_thread(name, error, step=attempt.committed[1])
