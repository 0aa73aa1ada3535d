"""Memory of one rank by phase, as measured by the rank.

Filled by `runtime.board` from what `runtime.rank.memory` writes. Read by the metrics, `grpo-run status` and
the evidence of an incident. Does not judge.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
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


@dataclass(kw_only=True, slots=True)
class RankMemory:
    """Memory of one rank in this attempt: at the last measurement, its highest, and by phase. Sizes in bytes.
    The rank that measures it changes its own in place.
    """

    has_device: bool = False
    """Whether the rank uses a device whose memory torch's allocator counts."""
    capacity_bytes: int = 0
    """Memory of the device; 0 without one."""
    readings: int = 0
    spent_ns: int = 0
    """What measuring has cost the rank."""
    allocated_bytes: int = 0
    reserved_bytes: int = 0
    inactive_split_bytes: int = 0
    resident_bytes: int = 0
    peak_allocated_bytes: int = 0
    peak_reserved_bytes: int = 0
    retries: int = 0
    ooms: int = 0
    """Allocations that have failed for want of memory, also those that the script has handled."""
    released_bytes: int = 0
    """What cleanup has returned to the device."""
    freed_bytes: int = 0
    """What cleanup has freed of the rank's memory on the host."""
    phases: dict[Phase, PhaseMemory] = field(default_factory=dict)

    @property
    def spent_seconds(self) -> float:
        """What measuring has cost the rank."""
        return self.spent_ns / 1e9

    def as_json(self) -> dict[str, Any]:
        """Return the object that `grpo-run status --json` and the evidence of an incident hold."""
        whole = asdict(self)
        del whole["spent_ns"]
        phases = {phase.name: memory for phase, memory in whole["phases"].items()}
        return whole | {"spent_seconds": round(self.spent_seconds, 6), "phases": phases}
