"""The outcome of a run: its exit code and sentence, set in one place, and the orderly end.

The supervisor creates the `RunOutcome` at its start and tells it how the run ends. It writes the end in
a fixed order: state, last snapshots, sentence, and the journal's last event. A failure of the supervisor
itself is reported in a file, see `last_resort.py`. Does not decide that a run ends, or that it has not
finished (`policy.py`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED, EXIT_USAGE
from grpo_run.runtime.history.events import ResumeMissed, RunEnded, WarningGiven
from grpo_run.runtime.history.lifecycle import Lifecycle, RunEvent
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.summary import lacks_model_of_script, model_place, summarize
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes.agent import Directive
from grpo_run.runtime.snapshots import last_writes
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.last_writes import OnlyInMemory, write_last
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.last_resort import describe, write_report
from grpo_run.runtime.supervisor.points import SupervisorFeature
from grpo_run.runtime.supervisor.policy import why_not_finished

Result = TypeVar("Result")


def writing_command(run_directory: Path) -> str:
    """Return the command that writes what only memory has, as a sentence."""
    run = shlex.quote(os.path.abspath(run_directory))
    return f"`grpo-run resume {run}` writes what is in memory when there is room."


class RunOutcome:
    """How one run ends. `exit_code` is None and `sentence` empty until it has.

    Args:
        config: of the run.
        incidents: the folder of all incidents.
        live: journal and history of the run.
        reporter: for events and messages.
        lifecycle: of the run.
        drains: writes the last snapshots; None if there are none.
        features: are asked for what they say at the end.
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
        drains: DrainScheduler | None,
        features: Sequence[SupervisorFeature],
        interrupted: Callable[[], bool],
    ) -> None:
        self.exit_code: int | None = None
        self.sentence = ""
        self._config = config
        self._incidents = incidents
        self._live = live
        self._reporter = reporter
        self._lifecycle = lifecycle
        self._drains = drains
        self._features = features
        self._interrupted = interrupted
        self._checkpoint_before = live.history.highest_checkpoint

    @property
    def directive(self) -> Directive:
        """What the agent does at the end of the run."""
        return Directive.finished if self.exit_code == EXIT_FINISHED else Directive.terminate

    def end(self, event: RunEvent, exit_code: int, attempt: Attempt, sentence: str = "") -> Directive:
        """Write the end of the run.

        Args:
            event: for the lifecycle.
            exit_code: as decided so far; `policy.why_not_finished` may change it.
            attempt: the last one.
            sentence: how the run ended; empty to summarize its state.
        """
        self.exit_code = exit_code  # also if what follows fails
        self._live.read_ranks()
        history, completed = self._live.history, event is RunEvent.completed
        left, kept = self._write_last(wait=completed)
        unsaved = self._unsaved(left) if completed else ""
        asked = (feature.end_remark(exit_code, attempt.local_rank_of) for feature in self._features)
        remarks = [remark for remark in asked if remark is not None]
        left_out = self._left_out() if completed else ""
        if left_out:
            self._reporter.write(ResumeMissed(mismatch=left_out))
        unfinished = completed and why_not_finished(
            history,
            unsaved=unsaved,
            refused=next((remark.unfinished for remark in remarks if remark.unfinished), ""),
            left_out=left_out if self._config.require_resume else "",
        )
        if unfinished:
            event, exit_code, sentence = RunEvent.gave_up, EXIT_GAVE_UP, unfinished
        self._lifecycle.fire(event)
        sentence = sentence or summarize(str(self._lifecycle.state), history, exit_code)
        said = [sentence, model_place(history) if event is RunEvent.completed else ""]
        if left is not None and not completed and exit_code != EXIT_USAGE:
            said.append(f"{left.sentence} On this machine, the same command continues from it.")
        elif left is not None and not (unsaved and left.required):
            self._reporter.warn(None, left.sentence)
        warnings = [left_out if left_out not in sentence else "", *(remark.text for remark in remarks)]
        for text in filter(None, warnings):
            self._reporter.write(WarningGiven(text=text))
        said += [*warnings, *history.ended()]
        self.exit_code, self.sentence = exit_code, " ".join(filter(None, said))
        self._reporter.write(
            RunEnded(
                exit_code=exit_code,
                sentence=self.sentence,
                step=attempt.committed[1],
                snapshots_kept=kept,
                completed=event is RunEvent.completed or bool(unsaved),
                stopped=event is RunEvent.stopped,
            )
        )
        self._live.journal.sync()
        return self.directive

    def end_after_failure(
        self, error: BaseException, attempt: Attempt, stop_jointly: Callable[[], bool]
    ) -> Directive:
        """The supervisor has failed: report it, let the ranks save and stop, and end the run.

        Each part of the end is attempted, whatever became of the others. A run that has ended already keeps
        its exit code. Else it is 75 if the ranks have stopped and the run has a newer checkpoint than when
        this supervisor took it over: the same command makes progress, even if it fails in the same way.

        Args:
            error: the failure.
            attempt: the last one.
            stop_jointly: lets the ranks save and stop, and returns whether all of them have.
        """
        step, sentence = attempt.committed[1], f"grpo-run itself failed: {describe(error)}."
        report = write_report(self._incidents, error, step=step)
        self._attempt("the message", lambda: self._reporter.notify(f"{sentence} Report: {report}"))
        if self.exit_code is not None:
            return self.directive
        stopped = self._attempt("the joint stop", stop_jointly)
        self.sentence = sentence
        drains, kept = self._drains, False
        if drains is not None:
            self._attempt("writing the last snapshots", functools.partial(drains.flush, newest_only=False))
            left = self._attempt("reading what is in memory", lambda: OnlyInMemory.of(drains))
            kept = self._attempt("stopping the drain worker", drains.close) is not False
            if left is not None:
                sentence = f"{sentence} {left.sentence}"
        self._attempt("reading the journal", self._live.read_ranks)
        resumable = stopped and self._live.history.highest_checkpoint > self._checkpoint_before
        event, code = (RunEvent.stopped, EXIT_STOPPED) if resumable else (RunEvent.gave_up, EXIT_GAVE_UP)
        self.exit_code = code
        self._attempt("the state of the run", lambda: self._lifecycle.fire(event))
        self._attempt(
            "the journal",
            lambda: self._reporter.write(
                RunEnded(exit_code=code, sentence=sentence, step=step, snapshots_kept=kept)
            ),
        )
        self._live.journal.sync()
        return self.directive

    def report_thread(self, name: str, error: BaseException, attempt: Attempt) -> None:
        """Report that a thread of the supervisor has ended with an exception. The run goes on without it."""
        report = write_report(self._incidents, error, step=attempt.committed[1], part=f"the thread {name}")
        text = f"{name} has failed; the run continues without it: {describe(error)}. Report: {report}"
        self._attempt("the warning", lambda: self._reporter.warn(None, text))

    def _attempt(self, what: str, function: Callable[[], Result]) -> Result | None:
        """Call a function after the supervisor has failed, and return its result.

        A further failure is reported in one line; None is returned.
        """
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - the remaining parts of the end must still happen
            with contextlib.suppress(Exception):
                self._reporter.notify(f"{what} failed too: {describe(error)}")
            return None

    def _write_last(self, *, wait: bool) -> tuple[OnlyInMemory | None, bool]:
        """Write what is in memory to disk; return what could not be written, and whether memory is kept.

        Args:
            wait: for room, unless somebody has asked the run to stop.
        """
        if self._drains is None:
            return None, False
        left = write_last(
            self._drains,
            wait_seconds=last_writes.WAIT_SECONDS if wait else 0.0,
            interrupted=self._interrupted,
            notify=self._reporter.notify,
            only_model=wait and lacks_model_of_script(self._live.history),
        )
        kept = self._drains.close()
        self._live.read_ranks()
        return left, kept

    def _unsaved(self, left: OnlyInMemory | None) -> str:
        """What is missing on disk: scheduled, asked for, or the only copy of the model; empty if nothing
        is.
        """
        parts = [self._live.history.lost.sentence]
        if left is not None and left.required:
            parts.append(f"{left.sentence} {writing_command(self._config.run_directory)}")
        if left is None and any(parts):
            parts.append(model_place(self._live.history))
        return " ".join(filter(None, parts))

    def _left_out(self) -> str:
        """The call that was interrupted in an earlier attempt and that the script has not repeated; empty if
        none.
        """
        history = self._live.history
        call = history.calls.interrupted
        if call is None or call.attempt >= history.attempts - 1:
            return ""
        return f"{call.place} was interrupted at {call.progress}, and the script ended without continuing it."
