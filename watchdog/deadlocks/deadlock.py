"""A proved deadlock: cause, culprits, and what each rank is in.

Made by `proof.py`, turned into a verdict by `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import Collective
from grpo_run.watchdog.verdict import Location


@dataclass(frozen=True, kw_only=True, slots=True)
class Deadlock:
    """A proved deadlock. `culprits` is empty if the records do not tell which rank is at fault.

    `at` is the collective that each observed rank is in, or its last one; None if it has none. `mismatch`
    compares the two operations that cannot complete one another.
    """

    cause: Cause
    culprits: tuple[int, ...]
    waiters: tuple[int, ...]
    at: Mapping[int, Collective | None]
    locations: Mapping[int, Location]
    mismatch: str | None
    sentence: str
