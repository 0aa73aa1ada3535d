"""The orderly end of a run: state, last snapshots, sentence and the journal's last event, in this order.

Called by the supervisor once it is decided how the run ends. The end after a failure of the supervisor itself
is in `last_resort.py`.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from grpo_run.runtime.errors import EXIT_GAVE_UP, EXIT_STOPPED, EXIT_USAGE
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.record.live_history import LiveHistory
from grpo_run.runtime.record.reporter import Reporter
from grpo_run.runtime.record.summary import model_place, summarize
from grpo_run.runtime.staging.draining import last_writes
from grpo_run.runtime.staging.draining.drain_scheduler import DrainScheduler
from grpo_run.runtime.staging.draining.last_writes import OnlyInMemory, write_last
from grpo_run.runtime.supervision.ending import drills
from grpo_run.runtime.supervision.lifecycle import Lifecycle, RunEvent


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
                `--strict-drills`.
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
        if missed and self._config.strict_drills and event is RunEvent.completed:
            event, exit_code = RunEvent.gave_up, EXIT_GAVE_UP
            place = "" if self._live.history.own.seen else f" at step {self._live.history.step}"
            sentence = f"The script ran to its end{place}, but --strict-drills asks for all drills."
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
        )
        kept = self._drains.close()
        self._live.read_ranks()
        return left, kept

    def _unsaved(self, left: OnlyInMemory | None) -> str:
        """What the script scheduled, or the user asked for, and is not on disk; empty if nothing is missing."""
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
        missed = drills.never_happened(self._config.injections, history.injections_fired, ranks=ranks)
        counted = history.counts_steps or not history.own.seen
        return drills.sentence(missed, history.step, counted=counted)


def writing_command(run_directory: Path) -> str:
    """Return the command that writes what only memory has, as a sentence."""
    run = shlex.quote(os.path.abspath(run_directory))
    return f"`grpo-run resume {run}` writes what is in memory when there is room."
