"""The wall time of a run by what it was spent on: every second in exactly one state. Pure.

`History` applies the journal's events. Time is assigned when the event comes that says what it was, and is
never assigned again, so that no state's seconds ever decrease: the first time that a step is committed is
productive, and each further time it is done again. Until a step is committed, its time is in no state.
Keeps nothing by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import (
    AttemptStarted,
    CheckpointPublished,
    CheckpointStaged,
    IncidentConfirmed,
    RunEnded,
    RunStarted,
    StepCommitted,
    TrainEnded,
    TrainStarted,
)


class WallState(str, Enum):
    """What a second of a run was spent on. The values are metric labels."""

    productive = "productive"
    """Steps that were committed for the first time."""
    startup = "startup"
    """Starts of ranks, and everything outside of the steps of `train()` calls."""
    checkpoint = "checkpoint"
    """Saves that ranks wait for."""
    detection = "detection"
    """From a fault to its verdict."""
    recovery = "recovery"
    """From a verdict until training resumes."""
    redone = "redone"
    """Steps that were committed before, and the begun step that a fault has ended."""
    stopped = "stopped"
    """No supervisor ran."""


@dataclass(kw_only=True)
class WallStates:
    """Seconds by state, up to the last event that has decided on a state. Times are of the wall clock."""

    seconds: dict[WallState, float] = field(default_factory=lambda: dict.fromkeys(WallState, 0.0))
    first: float | None = None
    """Time of the first event."""
    last: float | None = None
    """Time of the last event."""
    _assigned_to: float = 0.0
    _state: WallState | None = WallState.startup
    """The state of the time since; None inside a step, which is known at its end."""
    _saving_seconds: float = 0.0

    def elapsed_seconds(self, now: float | None = None) -> float:
        """Return the time of the run so far, without the time in which no supervisor ran.

        Args:
            now: for a run that is live; None for the time of the last event.
        """
        if self.first is None or self.last is None:
            return 0.0
        end = self.last if now is None else now
        if self._state is WallState.stopped:
            end = self._assigned_to
        return max(0.0, end - self.first - self.seconds[WallState.stopped])

    def apply(self, event: Event, best: tuple[int, int]) -> None:
        """Apply an event.

        Args:
            best: the furthest (train call, step) that was committed before it.
        """
        time = event.time
        before, self.last = self.last, time
        if before is None:
            self.first = self._assigned_to = time
        elif isinstance(event, RunStarted):
            self._assign(before)
            self._enter(WallState.stopped)
            self._assign(time)
            self._enter(WallState.startup)
        match event:
            case StepCommitted():
                position = event.train_call or best[0], event.step
                kind = WallState.productive if position > best else WallState.redone
                self._assign(event.committed_at or time, kind)
                self._enter(None)
            case AttemptStarted():
                self._assign(time)
                if self._state is not WallState.recovery:
                    self._enter(WallState.startup)
            case TrainStarted(rank=0 | None):
                self._assign(time, WallState.startup)
                self._enter(None)
            case TrainEnded(rank=0 | None):
                self._assign(time, WallState.startup)
                self._enter(WallState.startup)
            case CheckpointStaged():
                self._saving_seconds += event.seconds or 0.0
            case CheckpointPublished() if event.rank is not None:
                self._saving_seconds += event.seconds or 0.0
            case IncidentConfirmed():
                self._assign(min(time, event.failed_at or time))
                self._enter(WallState.detection)
                self._assign(time)
                self._enter(WallState.recovery)
            case RunEnded():
                self._assign(time, WallState.startup)
                self._enter(WallState.stopped)

    def _enter(self, state: WallState | None) -> None:
        self._state, self._saving_seconds = state, 0.0

    def _assign(self, until: float, step: WallState = WallState.redone) -> None:
        """Assign the time until now to the present state; inside a step, to `step` and to its saves."""
        seconds = max(0.0, until - self._assigned_to)
        self._assigned_to = max(until, self._assigned_to)
        if self._state is not None:
            self.seconds[self._state] += seconds
            return
        saving = min(seconds, self._saving_seconds)
        self.seconds[WallState.checkpoint] += saving
        self.seconds[step] += seconds - saving
