"""The rule for a phase that costs more and more for the same work. Pure; fed by `rank.py`.

Within a window of steps, cut into `PARTS`, the cost rises from each part to the next, by a tenth of the
mean factor at least, and is twice that of the beginning in the last one. A level that wanders does not rise
in each part, and one that jumps rises in one: the tests simulate both. What makes all phases slower,
such as another job on the machine, is divided out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, median
from typing import NamedTuple

BLOCK_STEPS = 10
BASE_BLOCKS = 3
PARTS = 16
SHORTEST_PART = 3
"""Blocks of a part of the shortest window; the next one is twice as long, and so on up to the whole run."""
LEAST_RISE = 0.1
GROWN = 2.0
NOTICEABLE = 0.05
"""Part of a step that a growth takes, at least."""
CONTROL_PHASES = ("data", "generate", "score", "reward", "forward_backward", "optimizer")
"""Phases that show the speed of the machine. What callbacks do is the script's own choice."""
CONTROL_SHARE = 0.01
"""Part of a step that such a phase takes, at least."""


class GrownPhase(NamedTuple):
    """A phase that has grown, and what it cost at the beginning and costs for the same work now."""

    phase: str
    before: float
    now: float


class GrowthWatch:
    """The costs of one call in one attempt."""

    def __init__(self) -> None:
        self._base: list[tuple[Mapping[str, float], Sequence[float]]] = []
        self._costs: defaultdict[str, list[float]] = defaultdict(list)
        self._found: set[str] = set()

    def add(self, seconds: Mapping[str, float], work: Sequence[float]) -> GrownPhase | None:
        """Add the mean step of a block; return a growth that was not found before.

        Args:
            seconds: by phase or callback, without what ran inside it.
            work: how much of each kind was done; attention costs more than tokens.
        """
        if len(self._base) < BASE_BLOCKS:
            self._base.append((seconds, work))
            return None
        first = {name: [one.get(name, 0.0) for one, _ in self._base] for name in seconds}
        base = {name: median(costs) for name, costs in first.items() if min(costs)}
        step_seconds = sum(base.values())
        done = zip(work, *(one for _, one in self._base), strict=True)
        more = max([1.0, *(now / fmean(before) for now, *before in done if any(before))])
        slower = {name: seconds[name] / more / base[name] for name in base}
        control = [one for one in CONTROL_PHASES if base.get(one, 0.0) > CONTROL_SHARE * step_seconds]
        for name, times in slower.items():
            machine = min((slower[one] for one in control if one != name and one in slower), default=1.0)
            self._costs[name].append(base[name] * times / max(1.0, machine))
        for name in [one for one in slower if one not in self._found]:
            now = _level_of_rise(self._costs[name], base[name])
            if now is not None and now - base[name] >= NOTICEABLE * step_seconds:
                self._found.add(name)
                return GrownPhase(name, base[name], now)
        return None


def _level_of_rise(costs: Sequence[float], before: float) -> float | None:
    """Return what the last part of a window costs that rises; None if none does."""
    blocks = SHORTEST_PART
    while PARTS * blocks <= len(costs):
        if len(costs) % blocks == 0:
            window = costs[-PARTS * blocks :]
            parts = [median(window[at : at + blocks]) for at in range(0, len(window), blocks)]
            if parts[-1] >= GROWN * before and min(parts) > 0:
                rises = [math.log(later / earlier) for earlier, later in pairwise(parts)]
                if min(rises) >= LEAST_RISE * fmean(rises):
                    return parts[-1]
        blocks *= 2
    return None
