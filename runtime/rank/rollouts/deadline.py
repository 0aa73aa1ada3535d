"""A time limit for one rollout or generation loop, and the record of what it did to each rollout.

`Deadline` is used by `_rollout.py` and by hand-written generation loops. It is the time of this rank alone:
a loop with collectives ends on all ranks together only through `trainers/consensus.py`, or through
generation that all ranks leave together. Interrupts nothing.

A deadline depends on the clock, and a step that is repeated after a fault would end in other weights. So
each rank journals its rollouts while `max_time` is set (`capping.py`), and reads these decisions when a
`train()` call begins. With another number of ranks, rollouts are others, and nothing is reapplied.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.journal import read_newest


class Deadline:
    """A time limit that begins now.

    Args:
        seconds: how long the limit is.
        clock: returns the time in seconds; it never goes back.

    Raises:
        UsageError: the limit is not above 0.
    """

    def __init__(self, seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        if not seconds > 0:
            raise UsageError(f"a deadline of {seconds} s: expected more than 0")
        self.seconds = seconds
        self._clock = clock
        self._end = clock() + seconds

    def passed(self) -> bool:
        """Return whether the time is over on this rank."""
        return self._clock() >= self._end


MAX_READ_BYTES = 64 << 20
"""At most the end of a journal is read: the rollouts of some hundred thousand steps. A fault repeats a
few.
"""


class RolloutKey(NamedTuple):
    """Which rollout of a rank."""

    train_call: int
    step: int
    """Optimizer steps done before it."""
    mode: str
    """`train` or `eval`."""
    number: int
    """Among those of this step and mode, from 0."""


class RolloutEnded(Event, kw_only=True):
    """A rollout of a rank has ended: its key, and the fields of `DeadlineDecision`."""

    step: int
    world_size: int
    train_call: int
    mode: str
    number: int
    decoding_steps: int
    timed_out_after: int | None


@dataclass(frozen=True, kw_only=True)
class DeadlineDecision:
    """What the deadline did to a rollout.

    Args:
        steps: decoding steps of the rollout, over all turns.
        timed_out_after: decoding steps after which it was ended; None if it ended itself.
    """

    steps: int
    timed_out_after: int | None

    def over(self, steps: int) -> bool | None:
        """Return whether the rollout is over after so many steps; None where it has become another one.

        A rollout that once ended itself and now goes on longer is another one: it was sampled with other
            seeds.
        """
        if self.timed_out_after is not None:
            return steps >= self.timed_out_after
        return False if steps <= self.steps else None


def read_decisions(journal: Path, rank: int, world_size: int) -> dict[RolloutKey, DeadlineDecision]:
    """Return this rank's decisions from the run's journal; the newest of each rollout. A missing file has
    none.
    """
    found: dict[RolloutKey, DeadlineDecision] = {}
    for event in read_newest(journal, RolloutEnded, MAX_READ_BYTES):
        if (event.rank, event.world_size) == (rank, world_size):
            key = RolloutKey(event.train_call, event.step, event.mode, event.number)
            found[key] = DeadlineDecision(steps=event.decoding_steps, timed_out_after=event.timed_out_after)
    return found
