"""Decide what a rank needs freed, from its memory at the end of each step. Pure: the clock is passed in.

Garbage in reference cycles shows as memory that stays higher from window to window; caches that no step
needs show as reserved memory above every peak of a window. What did not help is tried less and less often.
`StepMemory` is the input, made by `phases.py`. Used by `cleanup.py`, which acts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


class StepMemory(NamedTuple):
    """Memory when a step has ended, in bytes. `peak_allocated` is the highest in the step. All device figures
    may be 0.
    """

    allocated: int
    reserved: int
    peak_allocated: int
    anonymous: int
    capacity: int


SETTLING_STEPS = 3
"""Steps that are not looked at: the first ones allocate the optimizer's state and fill caches."""
LEAST_HOST_GROWTH_BYTES = 256 * 2**20
LEAST_DEVICE_GROWTH_BYTES = 64 * 2**20
"""Growth that is worth a collection; on a device also `DEVICE_GROWTH_SHARE` of its memory."""
DEVICE_GROWTH_SHARE = 0.01
LEAST_IDLE_BYTES = 512 * 2**20
IDLE_SHARE = 0.05
"""Reserved memory that no step of a window has used and that is worth releasing; the larger of both."""
SCARCE_SHARE = 0.1
"""Caches are released only if less than this share of the device is free: otherwise nobody needs the
memory.
"""
COST_FACTOR = 100.0
"""Time that must pass after cleaning, as a multiple of what it took: at most 1 % of the time is spent."""
PAID_COST_FACTOR = 20.0
"""The same after a collection that has freed what had grown: 5 %, because without it the run would end."""
MOST_PATIENCE = 64


class CleanupNeed(NamedTuple):
    """What is worth doing on this rank."""

    collect: bool = False
    """Collect garbage."""
    release: bool = False
    """Return cached device memory."""


NOTHING = CleanupNeed()


@dataclass(kw_only=True)
class _Window:
    """Steps that are looked at together, and what they have in common."""

    steps: int = 0
    allocated: int = 0
    anonymous: int = 0
    """The lowest at the end of a step: what stays in every step."""
    peak_allocated: int = 0

    def add(self, memory: StepMemory) -> None:
        """Add a step."""
        first = self.steps == 0
        self.steps += 1
        self.allocated = memory.allocated if first else min(self.allocated, memory.allocated)
        self.anonymous = memory.anonymous if first else min(self.anonymous, memory.anonymous)
        self.peak_allocated = max(self.peak_allocated, memory.peak_allocated)


@dataclass(frozen=True, kw_only=True)
class CleanupOutcome:
    """What cleaning has done on this rank."""

    seconds: float
    freed_bytes: int = 0
    """Of the rank's own memory on the host."""
    freed_device_bytes: int = 0
    """Of the memory that tensors use on the device."""
    released_bytes: int = 0
    """Returned to the device by the allocator."""
    collected: int = 0
    """Objects in reference cycles."""


class CleanupPolicy:
    """Decides on one rank; the ranks then agree by vote.

    Args:
        every: steps that are looked at together; 0 for none.
        clock: monotonic seconds.
    """

    def __init__(self, every: int, clock: Callable[[], float]) -> None:
        self._every = every
        self._clock = clock
        self._seen = 0
        self._began_at: int | None = None
        self._window = _Window()
        self._base: tuple[int, int] | None = None
        self._asked = NOTHING
        self._growth = (0, 0)
        self._collect_patience = self._release_patience = 1
        self._rest_until = -1.0

    def observe(self, step: int, memory: StepMemory, free_bytes: Callable[[], int]) -> CleanupNeed:
        """Return what is needed after a step.

        Args:
            memory: at the end of the step.
            free_bytes: asks the driver how much of the device is free.
        """
        self._seen += 1
        if not self._every or self._seen <= SETTLING_STEPS:
            return NOTHING
        if self._began_at is None:
            self._began_at = step
        self._window.add(memory)
        if step - self._began_at + 1 < self._every:
            return NOTHING
        window, self._window, self._began_at = self._window, _Window(), step + 1
        self._asked = self._judge(window, memory, free_bytes)
        return self._asked

    def cleaned(self, outcome: CleanupOutcome, memory: StepMemory) -> None:
        """Learn from a cleaning on which the ranks have agreed.

        Args:
            memory: after it.
        """
        self._base = memory.allocated, memory.anonymous
        self._window, self._began_at = _Window(), None
        asked, self._asked = self._asked, NOTHING
        paid = False
        if asked.collect:
            device, host = self._growth
            paid = (device > 0 and outcome.freed_device_bytes >= device / 4) or (
                host > 0 and outcome.freed_bytes >= host / 4
            )
            self._collect_patience = 1 if paid else min(2 * self._collect_patience, MOST_PATIENCE)
        factor = PAID_COST_FACTOR if paid else COST_FACTOR
        self._rest_until = self._clock() + factor * outcome.seconds
        if asked.release:
            # if the caches stay small, the next windows halve it
            self._release_patience = min(2 * self._release_patience, MOST_PATIENCE)

    def _judge(self, window: _Window, memory: StepMemory, free_bytes: Callable[[], int]) -> CleanupNeed:
        if self._base is None:
            self._base = window.allocated, window.anonymous
        if self._clock() < self._rest_until:
            return NOTHING
        capacity, patience = memory.capacity, self._collect_patience
        device = window.allocated - self._base[0]
        host = window.anonymous - self._base[1]
        self._base = min(self._base[0], window.allocated), min(self._base[1], window.anonymous)
        device_limit = max(LEAST_DEVICE_GROWTH_BYTES, int(DEVICE_GROWTH_SHARE * capacity))
        grown = (
            device if capacity and device >= patience * device_limit else 0,
            host if host >= patience * LEAST_HOST_GROWTH_BYTES else 0,
        )
        self._growth = grown
        idle, idle_limit = (
            memory.reserved - window.peak_allocated,
            max(LEAST_IDLE_BYTES, int(IDLE_SHARE * capacity)),
        )
        release = bool(capacity) and idle >= self._release_patience * idle_limit
        if release:
            release = free_bytes() < SCARCE_SHARE * capacity
        elif idle < idle_limit:
            self._release_patience = max(1, self._release_patience // 2)
        return CleanupNeed(collect=any(grown), release=release)
