"""Curves of a run: what is known of each step, reduced to as many points as a screen can show.

Follows the journal for the live page and the report of a run: what a Trainer logs, how fast steps were
committed, and what features draw of their events. Steps that a restart has undone are removed, and come again
when they are repeated. Of a long series, steps that share a point keep their smallest and largest value. Also
lists the charts of the core. Pure.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_run.dashboards.clean_text import clean
from grpo_run.runtime.charts import Chart
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import (
    CheckpointPublished,
    PhaseCosts,
    StepCommitted,
    StepLogged,
    TrainStarted,
)
from grpo_run.runtime.history.history import History
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS

Points = list[tuple[int, float, float, float]]
"""Step, mean, smallest and largest value of groups of steps."""

CHARTS = (
    Chart(key="reward", group="learning", title="Reward", metrics=("grpo_rank_reward", "grpo_reward")),
    Chart(key="reward_function", group="learning", title="Reward of each function",
          metrics=("grpo_reward_function_mean",)),
    Chart(key="reward_std", group="learning", title="Spread of rewards, standard deviation",
          metrics=("grpo_rank_reward_std", "grpo_reward_function_std")),
    Chart(key="zero_variance_groups", group="learning", title="Groups with equal rewards", unit="ratio"),
    Chart(key="loss", group="learning", title="Loss"),
    Chart(key="grad_norm", group="learning", title="Gradient norm"),
    Chart(key="kl", group="learning", title="KL divergence"),
    Chart(key="entropy", group="learning", title="Entropy"),
    Chart(key="clip_ratio", group="learning", title="Clipped tokens", unit="ratio"),
    Chart(key="learning_rate", group="learning", title="Learning rate"),
    Chart(key="sampling_logp_difference", group="learning", title="Log-probabilities, vLLM against trainer"),
    Chart(key="importance_sampling_ratio", group="learning", title="Importance sampling ratio"),
    Chart(key="completion_length", group="rollouts", title="Completion length", unit="tokens",
          metrics=("grpo_rank_completion_length", "grpo_rank_completion_length_max",
                   "grpo_rank_terminated_completion_length")),
    Chart(key="truncated_completions", group="rollouts", title="Truncated completions", unit="ratio"),
    Chart(key="tokens_per_second", group="rollouts", title="Tokens per second",
          metrics=("grpo_rank_tokens_generated_total",)),
    Chart(key="completions_per_second", group="rollouts", title="Completions per second",
          metrics=("grpo_rank_completions_total",)),
    Chart(key="step_seconds", group="machine", title="Time of a step", unit="seconds",
          metrics=("grpo_step_seconds", "grpo_step_duration_seconds")),
    Chart(key="phase_seconds", group="machine", title="Longest phases of a step, rank 0", unit="seconds",
          metrics=("grpo_phase_duration_seconds",)),
    Chart(key="device_memory", group="machine", title="GPU memory, allocated", unit="bytes", sampled=True,
          metrics=("grpo_rank_gpu_memory_allocated_bytes",)),
    Chart(key="gpu_utilization", group="machine", title="GPU utilization", unit="ratio", sampled=True,
          metrics=("grpo_gpu_utilization_ratio",)),
    Chart(key="gpu_memory", group="machine", title="GPU memory, all processes", unit="bytes", sampled=True,
          metrics=("grpo_gpu_memory_used_bytes",)),
    Chart(key="gpu_temperature", group="machine", title="GPU temperature", unit="celsius", sampled=True,
          metrics=("grpo_gpu_temperature_celsius",)),
    Chart(key="rank_memory", group="machine", title="Host memory of the ranks", unit="bytes", sampled=True,
          metrics=("grpo_rank_host_memory_bytes",)),
    Chart(key="host_memory", group="machine", title="Host memory in use", unit="bytes", sampled=True,
          metrics=("grpo_host_memory_working_set_bytes",)),
)  # fmt: skip
"""The charts of the core. One without metrics shows the rank's metric of its own name."""
LINES = {
    "completion_length_max": "completion_length/longest",
    "terminated_completion_length": "completion_length/ended by itself",
}
"""The keys of logged fields that are not drawn alone; the others have their own names."""
FIELD_LINES = tuple((field, LINES.get(field, field)) for field in LOGGED_FIELDS)
FUNCTION_LINES = {"mean": "reward_function", "std": "reward_std"}
MOST_LINES = 160
MOST_LABEL = 100
LEAST_SECONDS = 0.001
"""Steps that are closer were seen in one look, as by a supervisor that was suspended."""
SHOWN_PHASES = 6
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

    def increase(self, step: int, value: float) -> None:
        """Add to the value of a step, of which several ranks or calls tell their part."""
        at = bisect_left(self._steps, step)
        if at == len(self._steps) or self._steps[at] != step:
            self._steps.insert(at, step)
            self._values.insert(at, 0.0)
        self._values[at] += value

    def cut(self, last: int) -> None:
        """Remove what comes after a step."""
        keep = bisect_right(self._steps, last)
        del self._steps[keep:], self._values[keep:]

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return copies of the steps and their values."""
        return np.array(self._steps, np.int64), np.array(self._values, np.float64)

    def points(self, most: int = MOST_POINTS) -> Points:
        """Return (step, mean, smallest, largest) for at most so many groups of steps.

        A group has the steps of one multiple of a power of two, so that points of the past stay as they are
        while the curve grows. The step is the last one of the group.
        """
        if not self._steps:
            return []
        steps, values = self.arrays()
        width = 1
        while (steps[-1] - steps[0]) // width >= most:
            width *= 2
        starts = np.flatnonzero(np.diff((steps - 1) // width, prepend=-2))
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
        self.checkpoints: list[dict[str, Any]] = []
        self.changes = 0
        """Grows with every change of a curve."""
        self._begin(0)

    def _begin(self, call: int) -> None:
        self.train_call = call
        self.curves: dict[str, Curve] = {}
        self._known: dict[str, Curve] = {}
        """The same, by the keys as they are told."""
        self.phases: dict[str, Curve] = {}
        """By phase or callback, the median of its seconds in a step over blocks of steps, at their ends."""
        self._before: StepCommitted | None = None

    def apply(self, event: Event, history: History) -> None:
        """Take one event of the journal."""
        match event:
            case StepLogged(step=int(step)):
                self._logged(event, step, event.train_call or history.train_call)
            case StepCommitted():
                self._committed(event, event.train_call or history.train_call)
            case TrainStarted(rank=0 | None) if event.train_call == self.train_call:
                self.changes += 1
                self._before = None
                for curve in (*self.curves.values(), *self.phases.values()):
                    curve.cut(event.step or 0)
            case PhaseCosts() if event.train_call == self.train_call:
                for name, seconds in event.seconds.items():
                    self.phases.setdefault(clean(name, MOST_LABEL), Curve()).add(event.step, seconds)
            case CheckpointPublished():
                published = {"step": event.step, "path": event.path, "at": event.time}
                gone = {event.path, *event.removed}
                others = [one for one in self.checkpoints if one["path"] not in gone]
                published |= {"verified": event.verified, "train_call": event.train_call}
                self.checkpoints = [*others, published][-KEPT_CHECKPOINTS:]
        for part in history.takers(type(event)):
            for key, value in part.drawn(event).items():
                if self.train_call:
                    self._line(key).increase(event.step or history.step, value)

    def add(self, key: str, step: int, value: float | None) -> None:
        """Add the value of a line at a step; None is nothing."""
        if value is not None:  # the journal has null for what is not finite
            (self._known.get(key) or self._line(key)).add(step, value)
            self.changes += 1

    def _line(self, key: str) -> Curve:
        """The curve of a key, whose label may be a script's; those beyond a bound are not kept."""
        if len(self._known) >= MOST_LINES:
            return self._known.get(key) or Curve()
        curve = self.curves.setdefault(clean(key, MOST_LABEL), Curve())
        return self._known.setdefault(key, curve)

    def _logged(self, event: StepLogged, step: int, call: int) -> None:
        if call != self.train_call:
            self._begin(call)
        for field, key in FIELD_LINES:
            if (value := getattr(event, field)) is not None:
                self.add(key, step, value)
        for name, value in event.clipped.items():
            self.add(f"clip_ratio/{name.replace('_', ' ')}", step, value)
        for name, values in event.reward_functions.items():
            for kind, key in FUNCTION_LINES.items():
                self.add(f"{key}/{name}", step, values.get(kind))

    def _committed(self, event: StepCommitted, call: int) -> None:
        if call != self.train_call:
            self._begin(call)
        before, self._before = self._before, event
        if before is None or before.attempt != event.attempt or event.step <= before.step:
            return  # the first step of an attempt begins with its start
        seconds = (event.committed_at or event.time) - (before.committed_at or before.time)
        if seconds < LEAST_SECONDS:
            self._before = before
            return
        self.add("step_seconds", event.step, seconds / (event.step - before.step))
        for name in ("tokens", "completions"):
            made = (getattr(event, name) or 0) - (getattr(before, name) or 0)
            if getattr(event, name) and made >= 0:
                self.add(f"{name}_per_second", event.step, made / seconds)

    def points(self, most: int = MOST_POINTS) -> dict[str, Points]:
        """Return the points of each line that has some, by its key."""
        return {key: points for key, curve in self.curves.items() if (points := curve.points(most))}

    def longest_phases(self, most: int = MOST_POINTS) -> dict[str, Points]:
        """Return the points of the phases and callbacks that took most time, the longest first."""
        points = {name: one for name, curve in self.phases.items() if (one := curve.points(most))}
        mean = {name: sum(point[1] for point in one) / len(one) for name, one in points.items()}
        return {name: points[name] for name in sorted(points, key=lambda name: -mean[name])[:SHOWN_PHASES]}

    def mean(self, key: str) -> float | None:
        """Return the mean of a line over all steps that have a value; None without any."""
        values = self.curves[key].arrays()[1] if key in self.curves else ()
        return float(np.mean(values)) if len(values) else None


def charts_of(history: History) -> tuple[Chart, ...]:
    """Return the charts of a run: those of the core, then those of features."""
    return (*CHARTS, *(chart for part in history.parts for chart in part.CHARTS))
