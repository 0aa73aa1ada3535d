"""Reward and completion length by step, computed from a journal, and their running means.

Called by `reward_plot.py`. Pure; draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grpo_run.runtime.continuity.recovery import Recovery
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.record.history import History

SMOOTHING_STEPS = 11
SMOOTHED_FRACTION = 1 / 50
"""Long curves are smoothed over this fraction of their steps, short curves over `SMOOTHING_STEPS`."""

Numbers = NDArray[np.float64]


@dataclass(kw_only=True)
class Curves:
    """Reward and completion length by train() call and step, after all recoveries."""

    rewards: dict[tuple[int, int], float] = field(default_factory=dict)
    lengths: dict[tuple[int, int], float] = field(default_factory=dict)
    recoveries: list[tuple[int, Recovery]] = field(default_factory=list)

    @classmethod
    def from_journal(cls, records: Iterable[dict[str, Any]]) -> Curves:
        """Replay a journal. Repeated steps replace earlier values; steps undone by a restart are removed."""
        curves, history = cls(), History()
        for record in records:
            history.apply(record)
            if record["event"] == "incident":
                curves.recoveries.append((history.train_call, history.recoveries[-1]))
            elif record["event"] == "train_started" and record.get("rank") in (0, None):
                resumed = (int(record["train_call"]), int(record.get("step") or 0))
                for series in (curves.rewards, curves.lengths):
                    for position in [position for position in series if position > resumed]:
                        del series[position]
            elif record.get("reward") is not None and record.get("step") is not None:
                position = (int(record.get("train_call") or history.train_call), int(record["step"]))
                curves.rewards[position] = float(record["reward"])
                if record.get("completion_length") is not None:
                    curves.lengths[position] = float(record["completion_length"])
        return curves

    @property
    def last_call(self) -> int:
        """The last train() call that logged rewards.

        Raises:
            RunDirectoryError: the journal has no rewards.
        """
        if not self.rewards:
            raise RunDirectoryError("the journal has no rewards to draw; no GRPO step has been logged yet")
        return max(call for call, _ in self.rewards)


def series_of(values: dict[tuple[int, int], float], call: int) -> tuple[Numbers, Numbers]:
    """Return the steps and values of one train() call in the order of the steps."""
    points = sorted((step, value) for (of_call, step), value in values.items() if of_call == call)
    return (
        np.array([step for step, _ in points], dtype=np.float64),
        np.array([value for _, value in points], dtype=np.float64),
    )


def running_mean(steps: Numbers, values: Numbers, window_steps: int) -> tuple[Numbers, Numbers]:
    """Return the mean of the values within half a window of each step.

    The window counts steps, not values, because the journal may lack steps. A NaN is inserted into every gap
    wider than the window, so that no line is drawn across it. The window is truncated at both ends.
    """
    reach = window_steps // 2
    means = np.array([values[np.abs(steps - step) <= reach].mean() for step in steps])
    gaps = np.flatnonzero(np.diff(steps) > window_steps) + 1
    return np.insert(steps, gaps, np.nan), np.insert(means, gaps, np.nan)


def smoothing_window(steps: Numbers) -> int:
    """Return the width of the running mean's window in steps; always odd."""
    span = int(steps[-1] - steps[0]) if len(steps) else 0
    return max(SMOOTHING_STEPS, int(span * SMOOTHED_FRACTION) | 1)
