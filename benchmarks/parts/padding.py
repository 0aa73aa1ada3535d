"""The fixed work that extends a step of `scripts/grpo.py` to an intended duration: half sleeping, half
computing.

Called by the overhead benchmarks. A step that waited "until a deadline" would hide the overhead. Runs no
training.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from scripts.work import compute


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Additional work of each step: seconds of sleep, and units of computing (`scripts/work.py`)."""

    sleep_seconds: float
    compute_units: int

    @property
    def arguments(self) -> list[str]:
        """The script's arguments for it."""
        return [
            "--step-seconds", f"{self.sleep_seconds:.6f}", "--compute-units", str(self.compute_units),
        ]  # fmt: skip


NO_PADDING = Padding(sleep_seconds=0.0, compute_units=0)


def unit_seconds() -> float:
    """Return the seconds that one unit of computing takes on this machine: the median of twenty batches."""
    batch, taken = 200, []
    for _ in range(20):
        began = time.perf_counter()
        compute(batch)
        taken.append((time.perf_counter() - began) / batch)
    return statistics.median(taken)


def padding_for(step_seconds: float, bare_seconds: float, one_unit_seconds: float) -> Padding:
    """Return the padding that extends a step of `bare_seconds` to about `step_seconds`."""
    half = max(0.0, step_seconds - bare_seconds) / 2
    return Padding(sleep_seconds=half, compute_units=round(half / one_unit_seconds))
