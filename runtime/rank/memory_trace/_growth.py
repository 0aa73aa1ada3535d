"""Decides whether what a script keeps grows, and whether it will fit until the run ends. Pure.

Used by `tracer.py` with the steps in which tensors were made and the sizes of what holds them. No single
number is evidence: something grows if it has kept a part of each of several steps, after the first ones.
Whether growth ends cannot be seen from outside, so growth alone is a notice. It is an alarm only if it will
not fit at its rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

FIRST_STEPS = 2
"""Steps in which memory grows in every script: state of the optimizer, caches, buffers of gradients."""
SUSPICIOUS = 3
"""Steps whose tensors are still alive before it is recorded where such tensors are made."""
ENOUGH = 5
"""Steps in which a mistake must be seen before it is reported: a kept graph, a cycle, a kept traceback."""
LOOKED_AT = 15
"""Steps whose tensors must be alive before a holder that may grow is looked for the first time."""
GROWING = 20
"""Steps in which a holder or a tensor must have grown before that is reported."""
MORE = 0.25
"""Part of the steps of a holder by which it must have grown before the next look."""
WIDEST_GAP = 4
"""How much longer than between other steps nothing may be added to what still grows."""
KEPT_SHARE = 0.75
"""Of what was made since an earlier look, how much a holder must have gained; the rest has replaced some."""
CONSIDERABLE = 0.1
"""Share of the memory that was free before it grew, which something must take before it is an alarm."""
SMALLEST_GROWTH_BYTES = 128
"""By which a tensor must be longer than the one before."""
MOST_FAMILIES = 4096
MOST_LENGTHS = 64
"""Lengths of one family in one step that are looked at."""


def steady_births(births: Iterable[int], *, first: int, now: int) -> list[int]:
    """Return the steps after the first ones of which something is alive; none if the growth has stopped.

    Args:
        births: steps in which something was made that is alive now.
        first: the first step that was looked at.
        now: the step that has ended.
    """
    steps = sorted({born for born in births if first + FIRST_STEPS <= born <= now})
    if len(steps) < 2:
        return steps
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(steps))
    usual = gaps[len(gaps) // 2]
    return steps if now - steps[-1] <= WIDEST_GAP * usual else []


class Gain(NamedTuple):
    """How much something has grown.

    Args:
        held_bytes: what it takes now.
        gained_bytes: how much of that is new.
        steps: that have passed since then.
    """

    held_bytes: int
    gained_bytes: int
    steps: int

    def outgrows(self, *, steps_left: int, free_bytes: int) -> bool:
        """Whether it already takes a considerable share of the memory and does not fit until the run ends.

        Args:
            steps_left: of the run; 0 if not known. Nothing is foreseen then.
            free_bytes: of the memory that it is in; 0 if not known.
        """
        if not (steps_left and free_bytes and self.steps):
            return False
        considerable = self.held_bytes >= CONSIDERABLE * (free_bytes + self.held_bytes)
        return considerable and self.gained_bytes / self.steps * steps_left > free_bytes


class HolderSizes:
    """The sizes of one holder, each time it was looked at."""

    def __init__(self) -> None:
        self._first: tuple[int, int] | None = None
        self._last: tuple[int, int] | None = None

    def look(self, step: int, held: Collection[tuple[int, int]]) -> Gain | None:
        """Return how much the holder has grown without a break; None if it has not since the last look.

        Args:
            step: that has ended.
            held: step and bytes of each storage in it.
        """
        last, total = self._last, sum(size for _, size in held)
        self._last = step, total
        made = sum(size for born, size in held if last is not None and born > last[0])
        if last is None or self._first is None or not made or total - last[1] < KEPT_SHARE * made:
            self._first = self._last
            return None
        return Gain(total, total - self._first[1], step - self._first[0])


class Family(NamedTuple):
    """Tensors that differ in the length of one dimension only."""

    group: Hashable
    others: tuple[int, ...]
    axis: int


class Made(NamedTuple):
    """A tensor that was made in a step and is alive at its end."""

    key: int
    group: Hashable
    shape: tuple[int, ...]
    bytes: int


@dataclass(kw_only=True)
class Longer:
    """Tensors of one family, each longer than the one of the step before.

    Attributes:
        family: of the tensors.
        made: the last.
        length: of the last.
        first_step: of the first, with its `first_bytes`.
        steps: in how many steps there was a longer one.
        lengths: of all tensors of the family in the last step that has made one.
    """

    family: Family
    made: Made
    length: int
    first_step: int
    first_bytes: int
    steps: int = 0
    lengths: set[int] = field(default_factory=set)

    def gain(self, step: int) -> Gain:
        """Return how much it has grown until a step."""
        return Gain(self.made.bytes, self.made.bytes - self.first_bytes, step - self.first_step)


class LongerTensors:
    """Watches for a tensor that is replaced by a longer one step after step, as in `x = torch.cat([x, new])`.

    The longest new tensor of a family counts. Lengths that the step before had too belong to other tensors,
    such as gradients. Batches of a curriculum look the same, and are in the memory as well.
    """

    def __init__(self) -> None:
        self._runs: dict[Family, Longer] = {}

    def step_ended(self, step: int, made: Iterable[Made]) -> list[Longer]:
        """Return the tensors that a step has made longer, each with the number of steps in a row."""
        lengths: dict[Family, dict[int, Made]] = {}
        for one in made:
            for axis, length in enumerate(one.shape):
                family = Family(one.group, (*one.shape[:axis], *one.shape[axis + 1 :]), axis)
                of_family = lengths.setdefault(family, {})
                if len(of_family) < MOST_LENGTHS:
                    of_family[length] = one
        if len(self._runs) > MOST_FAMILIES:
            self._runs.clear()
        return [run for family, found in lengths.items() if (run := self._follow(step, family, found))]

    def _follow(self, step: int, family: Family, found: dict[int, Made]) -> Longer | None:
        run = self._runs.get(family)
        known = run.lengths if run is not None else set()
        length = max(found.keys() - known, default=None)
        if length is None:
            return None
        made = found[length]
        if run is None or length < run.length or made.bytes - run.made.bytes < SMALLEST_GROWTH_BYTES:
            run = Longer(family=family, made=made, length=length, first_step=step, first_bytes=made.bytes)
            self._runs[family] = run
        else:
            run.made, run.length, run.steps = made, length, run.steps + 1
        run.lengths = set(found)
        return run if run.steps else None
