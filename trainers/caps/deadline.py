"""A time limit for one rollout or one generation loop.

Used by `rollout.py` and by hand-written generation loops. It is the time of this rank alone: a loop with
collectives ends on all ranks together only through `consensus` or through generation that all ranks leave together.
Interrupts nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from grpo_run.runtime.errors import UsageError


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
