"""A confirmed hang, as reported to the supervisor. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.stalls.stall import Stall


@dataclass(frozen=True, kw_only=True)
class HangFinding:
    """A confirmed hang: exactly one of `deadlock` and `stall` is set.

    `began_at_seconds` is when it began according to the ranks' own timestamps (monotonic clock).
    """

    deadlock: Deadlock | None = None
    stall: Stall | None = None
    began_at_seconds: float
