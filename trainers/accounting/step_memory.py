"""Memory at the end of a step, returned by `phases.py` and evaluated by hygiene. Plain data."""

from __future__ import annotations

from typing import NamedTuple


class StepMemory(NamedTuple):
    """Memory when a step has ended, in bytes. `peak_allocated` is the highest in the step. All device figures may be 0."""

    allocated: int
    reserved: int
    peak_allocated: int
    resident: int
    anonymous: int
    capacity: int
