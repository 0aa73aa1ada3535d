"""Curves of a run: what was logged at each step, reduced to as many points as a screen can show.

Follows the journal for the live page and the report of a run. Steps that a restart has undone are removed,
and come again when they are repeated. Of a long series, steps that share a point keep their smallest and
largest value. Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import CheckpointPublished, PhaseCosts, StepLogged, TrainStarted
from grpo_run.runtime.history.history import History

NAMES = ("reward", "completion_length", "kl", "loss")
"""Fields of `step_logged` that are drawn."""
MOST_POINTS = 600
KEPT_CHECKPOINTS = 8


class Curve:
    """One value by step, in ascending order of steps."""

    def __init__(self) -> None:
        self._steps = array("q")
        self._values = array("d")

    def add(self, step: int, value: float) -> None:
        """Add the value of a step; steps from it on are replaced."""
        if self._steps and step <= self._steps[-1]:
            self.cut(step - 1)
        self._steps.append(step)
        self._values.append(value)

    def cut(self, last: int) -> None:
        """Remove what comes after a step."""
        keep = bisect_right(self._steps, last)
        del self._steps[keep:], self._values[keep:]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return copies of the steps and their values."""
        return np.array(self._steps, np.int64), np.array(self._values, np.float64)

    def points(self) -> list[tuple[int, float, float, float]]:
        """Return (step, mean, smallest, largest) for at most `MOST_POINTS` groups of steps.

        A group has the steps of one multiple of a power of two, so that points of the past stay as they are
        while the curve grows. The step is the last one of the group.
        """
        if not self._steps:
            return []
        steps, values = self.arrays()
        width = 1
        while (steps[-1] - steps[0]) // width >= MOST_POINTS:
            width *= 2
        starts = np.flatnonzero(np.diff((steps - 1) // width, prepend=-1))
        ends = np.append(starts[1:], len(steps))
        columns = (
            steps[ends - 1].tolist(),
            (np.add.reduceat(values, starts) / (ends - starts)).tolist(),
            np.minimum.reduceat(values, starts).tolist(),
            np.maximum.reduceat(values, starts).tolist(),
        )
        return list(zip(*columns, strict=True))


class RunCurves:
    """The curves of the newest `train()` call that has logged something, and the last checkpoints."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.train_call = 0
        self.curves: dict[str, Curve] = {name: Curve() for name in NAMES}
        self.phases: dict[str, Curve] = {}
        """By phase or callback, the median of its seconds in a step over blocks of steps, at their ends."""
        self.checkpoints: list[dict[str, Any]] = []
        self.changes = 0
        """Grows with every change of a curve."""

    def apply(self, event: Event, history: History) -> None:
        """Take one event of the journal."""
        match event:
            case StepLogged(step=int(step)):
                self._logged(event, step, event.train_call or history.train_call)
            case TrainStarted(rank=0 | None) if event.train_call == self.train_call:
                self.changes += 1
                for curve in (*self.curves.values(), *self.phases.values()):
                    curve.cut(event.step or 0)
            case PhaseCosts() if event.train_call == self.train_call:
                for name, seconds in event.seconds.items():
                    self.phases.setdefault(name, Curve()).add(event.step, seconds)
            case CheckpointPublished():
                published = {"step": event.step, "path": event.path, "at": event.time}
                gone = {event.path, *event.removed}
                others = [one for one in self.checkpoints if one["path"] not in gone]
                self.checkpoints = [*others, published | {"verified": event.verified}][-KEPT_CHECKPOINTS:]

    def _logged(self, event: StepLogged, step: int, call: int) -> None:
        if call != self.train_call:
            self.train_call = call
            self.curves, self.phases = {name: Curve() for name in NAMES}, {}
        for name, curve in self.curves.items():
            value = getattr(event, name)
            if value is not None:  # the journal has null for what is not finite
                curve.add(step, value)
        self.changes += 1

    def points(self) -> dict[str, list[tuple[int, float, float, float]]]:
        """Return the points of each curve that has some."""
        return {name: points for name, curve in self.curves.items() if (points := curve.points())}
