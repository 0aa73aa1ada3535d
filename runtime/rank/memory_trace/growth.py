"""Decides whether what an object holds grows from step to step. Pure.

Used by `tracer.py` with the steps in which the tensors of one holder were made. A single number is no evidence: a holder grows if
it has kept something of each of several steps, after the first ones, and still keeps it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

FIRST_STEPS = 2
"""Steps in which memory grows in every script: state of the optimizer, caches, buffers of gradients."""
SUSPICIOUS = 3
"""Steps whose tensors are still alive before it is looked where such tensors are made, and then who holds them."""
ENOUGH = 5
"""Steps whose tensors a holder must keep before it is reported."""
ENOUGH_IF_BOUNDED = 50
"""The same for a holder whose code also removes, replaces or looks up what it holds: a replay buffer until it is full, and a
cache until it has seen all keys."""
WIDEST_GAP = 4
"""How much longer than between other steps nothing may be added: a holder that has stopped growing is no leak."""


def steady_births(births: Iterable[int], *, first: int, now: int) -> list[int]:
    """Return the steps after the first ones of which something is still alive; none if the growth has stopped.

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


def grows(births: Iterable[int], *, first: int, now: int, bounded: bool) -> bool:
    """Whether a holder has kept something of enough steps.

    Args:
        bounded: its code also removes, replaces or looks up what it holds.
    """
    enough = ENOUGH_IF_BOUNDED if bounded else ENOUGH
    return len(steady_births(births, first=first, now=now)) >= enough
