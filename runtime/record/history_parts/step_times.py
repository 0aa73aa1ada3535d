"""Durations of committed steps: the productive time of a run, and how long a step takes at present.

Filled by `History` as it replays the journal. Pure: times are passed in. Does not know why a step was slow.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

RECENT_COMMITS = 20
"""Commits whose median is the present step time."""
MIN_COMMITS = 3
"""The first step of an attempt includes compilation and connections; the median of three leaves it out."""


@dataclass
class StepTimes:
    """Durations of the steps that were committed and not repeated later. Times are wall clock seconds."""

    _commits: list[tuple[int, int, int, float]] = field(default_factory=list)
    """(train call, step, steps since the commit before, seconds since it)."""
    _last: tuple[int, int, float] | None = None

    def interrupt(self) -> None:
        """Do not count the time until training begins again: the ranks are started."""
        self._last = None

    def begin(self, call: int, step: int, at: float) -> None:
        """Training begins or resumes after `step`; the steps after it are done again."""
        self._commits = [known for known in self._commits if known[:2] <= (call, step)]
        self._last = (call, step, at)

    def commit(self, call: int, step: int, at: float) -> None:
        """Count a committed step. Fast steps are not all observed: a commit may stand for several."""
        last = self._last
        if last is not None and last[0] == call and step > last[1]:
            self._commits.append((call, step, step - last[1], at - last[2]))
        self._last = (call, step, at)

    def productive_seconds(self) -> float:
        """Return the seconds spent on these steps."""
        return sum(seconds for _, _, _, seconds in self._commits)

    def gained_seconds(self, call: int, step: int) -> float:
        """Return how long the steps beyond a position take at their median duration, in seconds."""
        gained = [
            (steps, seconds)
            for ordinal, reached, steps, seconds in self._commits
            if (ordinal, reached) > (call, step)
        ]
        if not gained:
            return 0.0
        return sum(steps for steps, _ in gained) * median(seconds / steps for steps, seconds in gained)

    def typical_seconds(self, call: int) -> float | None:
        """Return the median duration of a step over the last commits of a `train()` call; None until known."""
        recent = [
            seconds / steps
            for ordinal, _, steps, seconds in self._commits[-RECENT_COMMITS:]
            if ordinal == call
        ]
        return median(recent) if len(recent) >= MIN_COMMITS else None
