"""The supervisor's view of the hang detector: suspicions, warnings and phase durations.

The supervisor calls `poll` while no rank has failed. It fires the lifecycle events of a suspicion and warns
of blind spots of the watchdog, and publishes which rank the others wait for. Every
warning appears once per attempt. Does not detect hangs (`runtime/supervisor/detection/detector.py`) and does
not handle a finding (`faults.py`).
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.events import PhaseLearned, Suspicion
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.lifecycle import Lifecycle, RunEvent, RunState
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.processes.host_exchange import HostExchange
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.detection.detector import HangDetector
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.step_clock import StepClock
from grpo_run.watchdog.text import duration_text, rank_names

PHASE_DURATIONS_EVERY_SECONDS = 60.0
"""How often phase durations are written to the journal."""

AWAITED_EVERY_SECONDS = 1.0
"""How often the rank that is waited for is published again while it is the same."""

_DURATION = re.compile(r"[\d,.]+ s\b")


class HangMonitor:
    """Reports what the detector observes.

    Args:
        lifecycle: receives `suspicion` and `cleared`.
        reporter: for events and warnings.
        history: contains the phase durations of earlier attempts.
    """

    def __init__(
        self, detector: HangDetector, *, lifecycle: Lifecycle, reporter: Reporter, history: History
    ) -> None:
        self.detector = detector
        self._lifecycle = lifecycle
        self._reporter = reporter
        self._history = history
        self._suspicion: str | None = None
        self._board: Board | None = None
        self._awaited_shown: tuple[tuple[int, str] | None, float] = (None, -math.inf)
        self._durations_written_at = time.monotonic()
        self._step = StepClock(detector.settings, time.monotonic())

    def begin_attempt(
        self, attempt: Attempt, board: Board, pids: Mapping[int, int], exchange: HostExchange | None = None
    ) -> None:
        """Watch the ranks of a new attempt.

        Args:
            attempt: that has started.
            pids: process ids by rank.
            exchange: with the other hosts; None if there are none.
        """
        self._suspicion = None
        self._board = board
        self._awaited_shown = (None, -math.inf)
        self._step = StepClock(self.detector.settings, time.monotonic())
        self.detector.phase_durations.earlier_attempts = dict(self._history.phases)
        self.detector.begin_attempt(
            board, attempt.local_rank_of, pids, attempt.sockets, attempt.world_size, exchange
        )

    def poll(self, slots: Mapping[int, Slot | None]) -> HangFinding | None:
        """Scan once and report. Returns a confirmed hang, or None."""
        try:
            finding = self.detector.scan(slots)
        except (OSError, MemoryError) as error:
            # no descriptors or no memory: what is not observed is unknown, and no reason to act
            text = f"the watchdog cannot observe the ranks at present: {error or type(error).__name__}"
            self._reporter.warn_once(0, "not observed", text)
            return None
        self._show_awaited()
        for rank, reason in self.detector.blind.items():
            self._reporter.warn_once(
                rank,
                reason,
                f"the watchdog cannot see all of rank {rank}: {reason}; unobserved state is unknown, not"
                " healthy",
            )
        self._report_suspicion(self.detector.suspicion)
        if finding is None and time.monotonic() - self._durations_written_at > PHASE_DURATIONS_EVERY_SECONDS:
            self.write_phase_durations()
        found = finding or self._check_step(slots)
        if found is not None and self._board is not None and not self._board.has_full_size:
            return None  # truncated during the scan: parts of it have read as if nothing was written
        return found

    def _show_awaited(self) -> None:
        """Publish which rank is waited for: at once if that ends or another one is, else once a second."""
        awaited, now = self.detector.awaited, time.monotonic()
        shown = (awaited.rank, awaited.place) if awaited is not None else None
        if awaited is not None and awaited.outside and awaited.unknown_wait:
            seconds, place = now - awaited.since_seconds, awaited.callback or awaited.phase.name
            text = (
                f"rank {awaited.rank} has waited {seconds:.0f} s for {awaited.outside} in {place}; the usual"
                f" time is not known yet, so it is ended only after {awaited.deadline_seconds:.0f} s"
                " (--deadline-first, --deadline-ceiling)"
            )
            if seconds >= self.detector.settings.outside_limit_seconds:  # one that is known may be ended
                self._reporter.warn_once(0, "unknown wait", text)
        # a step that all ranks spend on something else is a matter of the script
        if awaited is not None and awaited.unusual and (awaited.waiters or awaited.phase is Phase.generate):
            subject = f"long {awaited.since_seconds}"
            self._reporter.warn_once(awaited.rank, subject, self._unusual(awaited, now))
        if shown == self._awaited_shown[0] and now - self._awaited_shown[1] < AWAITED_EVERY_SECONDS:
            return
        self._awaited_shown = shown, now
        if self._board is not None:
            self._board.write_awaited(awaited)

    def _unusual(self, awaited: AwaitedRank, now: float) -> str:
        """What is said of a rank that makes progress for far longer than it ever has."""
        shown = self.detector.phase_durations.current(now).durations.get(awaited.phase, Durations())
        place = f", at {awaited.place}" if awaited.place else ""
        wait = "waits" if len(awaited.waiters) == 1 else "wait"
        waiters = f"; {rank_names(awaited.waiters)} {wait} for it" if awaited.waiters else ""
        limit = awaited.deadline_seconds
        ends = f"; if it goes on, it is ended after {duration_text(limit)}" if math.isfinite(limit) else ""
        return (
            f"rank {awaited.rank} has been in {awaited.phase.name} for"
            f" {duration_text(now - awaited.since_seconds)} and goes on{place}; the longest of"
            f" {shown.occurrences} before took {duration_text(shown.shown_seconds)}{waiters}{ends}"
        )

    def outlasted(self, slots: Mapping[int, Slot | None]) -> bool:
        """Whether a rank generates, or runs the model, for many times as long as the run ever has."""
        return self.detector.outlasted(slots)

    def _check_step(self, slots: Mapping[int, Slot | None]) -> HangFinding | None:
        """Return a step that can have no end."""
        now = time.monotonic()
        self._step.record(slots, now)
        stall = self._step.stall()
        if stall is None:
            return None
        durations = self.detector.phase_durations
        ended = max((one.ended_seconds for one in durations.merged().values()), default=0.0)
        if stall.waited_seconds <= self.detector.settings.factor_ended * ended:
            return None  # as for phases: a legitimate pause costs one recovery
        durations.record_end(stall.key, stall.waited_seconds)
        return HangFinding(stall=stall, began_at_seconds=now - stall.waited_seconds)

    def write_phase_durations(self) -> None:
        """Write how long phases take, from which later attempts derive their deadlines."""
        self._durations_written_at = time.monotonic()
        for key, durations in self.detector.phase_durations.merged().items():
            phase, callback = (key, None) if isinstance(key, Phase) else (Phase.callback, key)
            self._reporter.write(
                PhaseLearned(phase=phase.name, callback=callback, durations=durations.as_json())
            )

    def _report_suspicion(self, suspicion: str | None) -> None:
        if suspicion and _without_durations(suspicion) != _without_durations(self._suspicion or ""):
            self._reporter.write(Suspicion(sentence=suspicion))
        if suspicion and self._lifecycle.state is RunState.running:
            self._lifecycle.fire(RunEvent.suspicion)
        elif not suspicion and self._lifecycle.state is RunState.suspect:
            self._lifecycle.fire(RunEvent.cleared)
        self._suspicion = suspicion


def _without_durations(sentence: str) -> str:
    """A suspicion without the seconds that it counts, which differ at each check."""
    return _DURATION.sub("", sentence)
