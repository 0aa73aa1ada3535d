"""Memory of the rank's device, as counted by torch's CUDA allocator, also on ROCm.

Called by `phases.py` when a phase ends. Reading asks the allocator and not the driver: it waits for no kernel. A rank
that has not initialized CUDA has no figures, and reading them never initializes it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, NamedTuple

from grpo_run.trainers.accounting.peaks import PeakStatistics


class DeviceReading(NamedTuple):
    """Figures of one device, in bytes. Peaks are those since the reading before; counters are the allocator's."""

    capacity: int
    allocated: int
    reserved: int
    inactive_split: int
    peak_allocated: int
    peak_reserved: int
    retries: int
    ooms: int


class DeviceMemory:
    """Reads the device that is current in the calling thread, once `connect` has been called."""

    def __init__(self) -> None:
        self._peaks: PeakStatistics | None = None
        self._cuda: Any = None
        self._capacities: dict[int, int] = {}

    def connect(self, module: ModuleType) -> None:
        """Use `torch.cuda.memory`, which was just imported."""
        self._peaks = PeakStatistics(module)
        self._peaks.hide()
        self._cuda = sys.modules["torch.cuda"]

    def connect_accelerator(self, module: ModuleType) -> None:
        """Hide our resets from `torch.accelerator.memory`, too; it is imported after `torch.cuda.memory`."""
        if self._peaks is not None:
            self._peaks.hide_from_accelerator(module)

    def read(self) -> DeviceReading | None:
        """Return the figures of now, and begin new peaks; None without an initialized device."""
        if self._peaks is None or not self._cuda.is_initialized():
            return None
        device = self._cuda.current_device()
        if device not in self._capacities:
            self._capacities[device] = int(self._cuda.get_device_properties(device).total_memory)
        statistics, peaks = self._peaks.take(device)
        return DeviceReading(
            capacity=self._capacities[device],
            allocated=_current(statistics, "allocated_bytes"),
            reserved=_current(statistics, "reserved_bytes"),
            inactive_split=_current(statistics, "inactive_split_bytes"),
            peak_allocated=peaks.get("allocated_bytes.all", 0),
            peak_reserved=peaks.get("reserved_bytes.all", 0),
            retries=statistics.get("num_alloc_retries", 0),
            ooms=statistics.get("num_ooms", 0),
        )

    def sizes(self) -> tuple[int, int]:
        """Return (allocated, reserved) of now, and leave the peaks alone; 0 without an initialized device."""
        if self._peaks is None or not self._cuda.is_initialized():
            return 0, 0
        return int(self._cuda.memory_allocated()), int(self._cuda.memory_reserved())

    def free_bytes(self) -> int:
        """Return how much of the device nobody uses, as the driver says; 0 without an initialized device."""
        if self._peaks is None or not self._cuda.is_initialized():
            return 0
        return int(self._cuda.mem_get_info()[0])

    def usable_bytes(self) -> int:
        """Return what torch's allocator may hold in all: what others leave, and no more than the script allows.

        0 without an initialized device, or with an allocator that does not tell.
        """
        if self._peaks is None or not self._cuda.is_initialized():
            return 0
        try:
            free, total = self._cuda.mem_get_info()
            share = float(self._cuda.get_per_process_memory_fraction())
            return min(int(free) + int(self._cuda.memory_reserved()), int(share * total))
        except RuntimeError:  # an allocator of the script's own (`CUDAPluggableAllocator`) does not tell
            return 0

    def release(self) -> None:
        """Return to the device what the allocator holds and no tensor uses."""
        if self._peaks is not None and self._cuda.is_initialized():
            self._cuda.empty_cache()


def _current(statistics: dict[str, Any], name: str) -> int:
    """Allocators other than torch's own lack some statistics."""
    value: int = statistics.get(name, {}).get("all", {}).get("current", 0)
    return value
