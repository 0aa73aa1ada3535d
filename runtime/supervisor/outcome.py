"""The outcome of a run: its exit code and sentence, set in one place, and the orderly end.

The supervisor creates the `RunOutcome` at its start and tells it how the run ends. `RunEnd` writes the end in
a fixed order: state, last snapshots, sentence, and the journal's last event. Injected faults that never
happened are named, because the run must not look like one that has passed them. The end after a failure of
the supervisor itself is in `last_resort.py`. Does not decide that a run ends.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import NamedTuple

from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED, EXIT_USAGE
from grpo_run.runtime.history.lifecycle import Lifecycle, RunEvent
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.status import lacks_model_of_script, model_place, summarize
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.injections import Injection, remaining
from grpo_run.runtime.processes.agent import Directive
from grpo_run.runtime.snapshots import last_writes
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.last_writes import OnlyInMemory, write_last
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.last_resort import LastResort


def never_happened(
    injections: Iterable[Injection], fired: Collection[str], *, ranks: Collection[int]
) -> tuple[Injection, ...]:
    """Return the drills of this node's ranks that did not happen.

    Args:
        injections: of the run.
        fired: canonical texts of those that happened, from the journal of this node.
        ranks: global ranks of this node; empty if no rank was ever started, which leaves nothing out.
    """
    return tuple(
        injection for injection in remaining(tuple(injections), fired) if not ranks or injection.rank in ranks
    )


def sentence(drills: Collection[Injection], step: int, *, counted: bool) -> str:
    """Return what to say about drills that never happened; empty if there are none.

    Args:
        drills: from `never_happened`.
        step: the last step of the run.
        counted: steps were counted: the script has used a Trainer or the loop.
    """
    if not drills:
        return ""
    number = "1 drill never happened" if len(drills) == 1 else f"{len(drills)} drills never happened"
    return f"{number}: {', '.join(f'{drill} ({_reason(drill, step, counted)})' for drill in drills)}."


def _reason(drill: Injection, step: int, counted: bool) -> str:
    if not counted:
        return "without a Trainer or a loop, steps are not counted"
    if drill.step > step:
        return f"the run ended at step {step}"
    if drill.recurs:
        limit = f"{drill.tokens} tokens" if drill.tokens else f"{drill.rows} rows"
        return f"no phase {drill.phase.name} from step {drill.step} on had more than {limit}"
    return f"step {drill.step} was not run with phase {drill.phase.name}"


class Ended(NamedTuple):
    """How a run has ended."""

    exit_code: int
    sentence: str


class RunEnd:
    """Ends one run.

    Args:
        config: of the run; its drills.
        live: journal and history of the run.
        reporter: for events and messages.
        lifecycle: of the run.
        drain_scheduler: writes the last snapshots; None if there are none.
        interrupted: whether a stop was requested, so that nothing is waited for.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        live: LiveHistory,
        reporter: Reporter,
        lifecycle: Lifecycle,
        drain_scheduler: DrainScheduler | None,
        interrupted: Callable[[], bool],
    ) -> None:
        self._config = config
        self._live = live
        self._reporter = reporter
        self._lifecycle = lifecycle
        self._drains = drain_scheduler
        self._interrupted = interrupted

    def end(
        self, event: RunEvent, exit_code: int, sentence: str, *, step: int, ranks: Collection[int]
    ) -> Ended:
        """Write the end of the run.

        Args:
            event: for the lifecycle.
            exit_code: as decided so far; a finished run with drills that never happened has failed under
                `--strict-faults`.
            sentence: how the run ended; empty to summarize its state.
            step: the last step committed in this attempt.
            ranks: global ranks of this node.
        """
        self._live.read_ranks()
        completed = event is RunEvent.completed
        left, kept = self._write_last(wait=completed)
        unsaved = self._unsaved(left) if completed else ""
        if unsaved:
            event, exit_code = RunEvent.gave_up, EXIT_GAVE_UP
            place = "" if left is not None else model_place(self._live.history)
            sentence = (
                f"The script ran to its end at step {self._live.history.step}, but {unsaved} {place}".rstrip()
            )
        missed = self._missed_drills(exit_code, ranks)
        if missed and self._config.strict_faults and event is RunEvent.completed:
            event, exit_code = RunEvent.gave_up, EXIT_GAVE_UP
            place = "" if self._live.history.own.seen else f" at step {self._live.history.step}"
            sentence = f"The script ran to its end{place}, but --strict-faults asks for all injected faults."
        left_out = self._left_out() if event is RunEvent.completed else ""
        if left_out:
            self._reporter.write("resume_missed", mismatch=left_out)
            if self._config.require_resume:
                event, exit_code, sentence = (
                    RunEvent.gave_up,
                    EXIT_GAVE_UP,
                    f"{left_out} --require-resume is set.",
                )
        self._lifecycle.fire(event)
        sentence = sentence or summarize(str(self._lifecycle.state), self._live.history, exit_code)
        if event is RunEvent.completed:
            sentence = " ".join(filter(None, (sentence, model_place(self._live.history))))
        if left is not None and not completed and exit_code != EXIT_USAGE:
            sentence = f"{sentence} {left.sentence} On this machine, the same command continues from it."
        elif left is not None and not (unsaved and left.required):
            self._reporter.warn(None, left.sentence)
        if left_out and left_out not in sentence:
            sentence = f"{sentence} {left_out}"
            self._reporter.write("warning", text=left_out)
        excluded = self._live.history.exclusions.summary
        sentence = " ".join(
            filter(None, (sentence, missed, excluded and f"Excluded from the loss: {excluded}."))
        )
        if missed:
            self._reporter.write("warning", text=missed)
        self._reporter.write(
            "run_ended",
            exit_code=exit_code,
            sentence=sentence,
            step=step,
            snapshots_kept=kept,
            completed=event is RunEvent.completed or bool(unsaved),
            stopped=event is RunEvent.stopped,
        )
        self._live.journal.sync()
        return Ended(exit_code, sentence)

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
        """What is missing on disk: scheduled, asked for, or the only copy of the model; empty if nothing is."""
        parts = [self._live.history.lost.sentence]
        if left is not None and left.required:
            parts.append(f"{left.sentence} {writing_command(self._config.run_directory)}")
        return " ".join(filter(None, parts))

    def _left_out(self) -> str:
        """The call that was interrupted in an earlier attempt and that the script has not repeated; empty if none."""
        history = self._live.history
        call = history.calls.interrupted
        if call is None or call.attempt >= history.attempts - 1:
            return ""
        return f"{call.place} was interrupted at {call.progress}, and the script ended without continuing it."

    def _missed_drills(self, exit_code: int, ranks: Collection[int]) -> str:
        """What to say about drills that never happened; nothing while the run may be continued."""
        if exit_code in (EXIT_STOPPED, EXIT_USAGE):
            return ""
        history = self._live.history
        missed = never_happened(self._config.injections, history.injections_fired, ranks=ranks)
        counted = history.counts_steps or not history.own.seen
        return sentence(missed, history.step, counted=counted)


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
        interrupted: Callable[[], bool],
    ) -> None:
        self.exit_code: int | None = None
        self.sentence = ""
        self._drains = drains
        self._run_end = RunEnd(
            config, live=live, reporter=reporter, lifecycle=lifecycle, drain_scheduler=drains,
            interrupted=interrupted,
        )  # fmt: skip
        self._last_resort = LastResort(incidents, live=live, reporter=reporter, lifecycle=lifecycle)

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
