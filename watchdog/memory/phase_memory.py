"""Memory of one rank by phase, as measured by the rank.

Filled by `runtime.board` from what `runtime.rank.memory` writes. Read by the metrics, `grpo-run status` and
the evidence of an incident. Does not judge.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_run.watchdog.observation import Phase


@dataclass(kw_only=True, slots=True)
class PhaseMemory:
    """Memory of one phase in this attempt, without the phases inside it. Sizes in bytes. The rank that
    measures it changes its own in place.

    Peaks are the highest of the attempt, all other sizes those at the last end of the phase. `allocated` is
    what tensors on the device use, `reserved` what torch's allocator holds for them, and `inactive_split` the
    part of it that it cannot return to the device. `retries` counts allocations that succeeded only after all
    caches were returned. `resident` is the rank's memory on the host, shared memory included; a peak between
    two ends is known only if it was the highest of the process. All device figures are 0 in a rank without a
    device.
    """

    readings: int = 0
    """How often the phase was measured."""
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    inactive_split_bytes: int = 0
    retries: int = 0
    peak_resident_bytes: int = 0
    resident_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory of one rank in this attempt: at the last measurement, its highest, and by phase. Sizes in
    bytes.
    """

    has_device: bool
    """Whether the rank uses a device whose memory torch's allocator counts."""
    capacity_bytes: int
    """Memory of the device; 0 without one."""
    readings: int
    spent_seconds: float
    """What measuring has cost the rank."""
    allocated_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int
    resident_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    retries: int
    ooms: int
    """Allocations that have failed for want of memory, also those that the script has handled."""
    released_bytes: int
    """What cleanup has returned to the device."""
    freed_bytes: int
    """What cleanup has freed of the rank's memory on the host."""
    phases: Mapping[Phase, PhaseMemory]

    def as_json(self) -> dict[str, Any]:
        """Return the object that `grpo-run status --json` and the evidence of an incident hold."""
        whole = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "phases"
        }
        whole["spent_seconds"] = round(self.spent_seconds, 6)
        return whole | {
            "phases": {phase.name: dataclasses.asdict(memory) for phase, memory in self.phases.items()}
        }
