"""What happens when the supervisor itself fails: a report, and a joint stop of the ranks.

An exception of the supervisor is an error in grpo-run, or a machine without memory, descriptors or disk. Its
traceback goes to an incident folder, and the ranks are asked to save and stop, as after SIGTERM. Called by
`supervisor.py` and `cli/launch.py` from their outermost handlers. Each part of the end is attempted, whatever
became of the others. Kills no process.
"""

from __future__ import annotations

import contextlib
import functools
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED
from grpo_run.runtime.history.lifecycle import Lifecycle, RunEvent
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.last_writes import OnlyInMemory
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.stop import StopRequest
from grpo_run.runtime.supervisor.stop_means import StopMeans
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.evidence import incident_files
from grpo_run.watchdog.verdict import Location, Verdict

Result = TypeVar("Result")

POLL_SECONDS = 0.1
MAX_MESSAGE_CHARACTERS = 300
ADVICE = (
    (
        "This is an error in grpo-run or a shortage of memory, file descriptors or disk space, not in the"
        " script."
    ),
    "Please report it with this file. The same command resumes from the newest checkpoint, if there is one.",
)


def describe(error: BaseException) -> str:
    """Return one line: the type, the message and the line where the exception was raised."""
    message = " ".join(str(error).split())[:MAX_MESSAGE_CHARACTERS]
    place = _location(error)
    return f"{type(error).__name__}{f': {message}' if message else ''}{f' ({place.short})' if place else ''}"


def write_report(incidents: Path, error: BaseException, *, step: int, part: str = "the supervisor") -> str:
    """Write the traceback to a new incident folder, and return where it is.

    Args:
        incidents: the folder of all incidents.
        step: the last committed step.
        part: what has failed.

    Returns:
        the path of the report; if it cannot be written, a sentence with the reason and the traceback.
    """
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    verdict = Verdict(
        cause=Cause.unknown,
        culprits=(),
        step=step,
        phase=None,
        confidence="proved",
        sentence=f"grpo-run itself failed, in {part}: {describe(error)}",
        signature=f"supervisor:{type(error).__name__}",
        deterministic=False,
        location=_location(error),
        traceback=text,
        advice=ADVICE,
    )
    try:
        folder = incident_files.open_incident(incidents)
        return str(incident_files.close_incident(folder, verdict, []) / "verdict.json")
    except OSError as failure:
        return f"not written ({failure.strerror or failure}):\n{text}"


class LastResort:
    """Reports failures of the supervisor, and ends its run.

    Args:
        incidents: the folder of all incidents.
        live: journal and history of the run.
        reporter: for events and messages.
        lifecycle: of the run.
    """

    def __init__(
        self, incidents: Path, *, live: LiveHistory, reporter: Reporter, lifecycle: Lifecycle
    ) -> None:
        self._incidents = incidents
        self._live = live
        self._reporter = reporter
        self._lifecycle = lifecycle
        self._checkpoint_before = live.history.highest_checkpoint

    def report(self, error: BaseException, *, step: int) -> str:
        """Write the report and tell the user. Returns the sentence that ends the run."""
        sentence = f"grpo-run itself failed: {describe(error)}."
        report = write_report(self._incidents, error, step=step)
        self.attempt("the message", lambda: self._reporter.notify(f"{sentence} Report: {report}"))
        return sentence

    def report_thread(self, name: str, error: BaseException, *, step: int) -> None:
        """Write the report of a thread that has failed; the run goes on without it."""
        report = write_report(self._incidents, error, step=step, part=f"the thread {name}")
        text = f"{name} has failed; the run continues without it: {describe(error)}. Report: {report}"
        self.attempt("the warning", lambda: self._reporter.warn(None, text))

    def attempt(self, what: str, function: Callable[[], Result]) -> Result | None:
        """Call a function after the supervisor has failed, and return its result.

        A further failure is reported in one line; None is returned.
        """
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - the remaining parts of the end must still happen
            with contextlib.suppress(Exception):
                self._reporter.notify(f"{what} failed too: {describe(error)}")
            return None

    def end(self, sentence: str, *, stopped: bool, step: int, drains: DrainScheduler | None) -> int:
        """Write the end of the run, and return its exit code.

        Args:
            sentence: of the report.
            stopped: all ranks have saved and stopped.
            step: the last committed step.
            drains: writes the last snapshots.

        Returns:
            75 if the ranks have stopped and the run has a newer checkpoint than when this supervisor took it
            over: the same command makes progress, even if it fails in the same way. Otherwise 93.
        """
        kept: bool | None = False
        if drains is not None:
            self.attempt("writing the last snapshots", functools.partial(drains.flush, newest_only=False))
            left = self.attempt("reading what is in memory", lambda: OnlyInMemory.of(drains))
            kept = self.attempt("stopping the drain worker", drains.close)
            if left is not None:
                sentence = f"{sentence} {left.sentence}"
        self.attempt("reading the journal", self._live.read_ranks)
        resumable = stopped and self._live.history.highest_checkpoint > self._checkpoint_before
        event, code = (RunEvent.stopped, EXIT_STOPPED) if resumable else (RunEvent.gave_up, EXIT_GAVE_UP)
        self.attempt("the state of the run", lambda: self._lifecycle.fire(event))
        self.attempt(
            "the journal",
            lambda: self._reporter.write(
                "run_ended", exit_code=code, sentence=sentence, step=step, snapshots_kept=kept is not False
            ),
        )
        self._live.journal.sync()
        return code


def stop_jointly(
    ranks: RankGroup,
    board: Board,
    attempt: Attempt,
    stop: StopRequest,
    *,
    request: Callable[[str], None],
    seconds: float,
) -> bool:
    """Ask the ranks to agree on a step, save and exit, and wait until they have.

    Args:
        request: requests the stop of the run, for a reason.
        seconds: how long they may take.

    Returns:
        whether every rank has stopped or completed. If one has failed, the others would wait for it.
    """
    agreed = (StopMeans.vote, StopMeans.exit)
    if attempt.exits.failed or stop.means(attempt, attempt.read_slots(board)) not in agreed:
        return False
    if not stop.requested:
        request("failure of the supervisor")
    board.request_stop()
    deadline = time.monotonic() + seconds
    while ranks.alive and time.monotonic() < deadline and not stop.take_noted():
        if any(exit.exit_code not in (EXIT_FINISHED, EXIT_STOPPED) for exit in ranks.wait(POLL_SECONDS)):
            return False
    return not ranks.alive


def _location(error: BaseException) -> Location | None:
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None
    return Location(file=frames[-1].filename, line=frames[-1].lineno or 0, function=frames[-1].name)
