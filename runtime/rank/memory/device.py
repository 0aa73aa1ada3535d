"""Memory of the rank's device as counted by torch's CUDA allocator, also on ROCm, with a peak per phase.

`phases.py` reads it when a phase ends. Reading asks the allocator and not the driver, so it waits for no
kernel. A rank that has not initialized CUDA has no figures, and reading never initializes it.

The allocator keeps one peak since its last reset, so the statistics are reset when a phase begins, and a
script that logs `torch.cuda.max_memory_allocated()` would see less than it has used. `PeakStatistics`
therefore wraps the functions that read and reset them: what our resets have discarded is added to what the
script reads, until the script itself resets. Functions such as `memory_summary` call the wrapped ones. Only
public functions are wrapped; a script that reads `torch._C` sees the allocator's own values.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NamedTuple

Statistics = dict[Any, Any]
"""Nested, as `torch.cuda.memory_stats_as_nested_dict` returns them."""
_PEAK = "peak"


class PeakStatistics:
    """Reads the statistics of a device and starts new peaks, hidden from the script.

    Args:
        module: `torch.cuda.memory`.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module = module
        self._read: Callable[..., Statistics] = module.memory_stats_as_nested_dict
        self._reset: Callable[..., None] = module.reset_peak_memory_stats
        self._hidden: dict[int, dict[str, int]] = {}
        """By device: the highest peaks that were discarded since the script's last reset, by name."""
        self._discarded: dict[int, dict[str, int]] = {}
        """By device: the peaks that the script has discarded since the last `take`."""

    def take(self, device: int) -> tuple[Statistics, dict[str, int]]:
        """Return the statistics of a device with its peaks by name since the last `take`, and begin new
        peaks.
        """
        statistics = self._read(device)
        peaks = _peaks(statistics)
        self._reset(device)
        _keep_highest(self._hidden.setdefault(device, {}), peaks)
        _keep_highest(peaks, self._discarded.pop(device, {}))
        return statistics, peaks

    def hide(self) -> None:
        """Wrap the functions of torch that read and reset these statistics."""

        @functools.wraps(self._read)
        def read(device: Any = None) -> Statistics:
            statistics = self._read(device=device)
            if self._hidden and statistics:
                hidden = self._hidden.get(self._index(device), {})
                for name, value in _with_peaks(statistics):
                    value[_PEAK] = max(value[_PEAK], hidden.get(name, 0))
            return statistics

        self._wrap(self._module, "torch.cuda", read, self._reset)

    def hide_from_accelerator(self, module: ModuleType) -> None:
        """Wrap the functions of `torch.accelerator.memory`, which read the same statistics."""
        read_all = module.memory_stats

        @functools.wraps(read_all)
        def read(device: Any = None, /) -> Statistics:
            statistics: Statistics = read_all(device)
            if self._hidden and statistics:
                for name, peak in self._hidden.get(self._index(device), {}).items():
                    key = f"{name}.{_PEAK}"
                    if key in statistics:
                        statistics[key] = max(statistics[key], peak)
            return statistics

        self._wrap(module, "torch.accelerator", read, module.reset_peak_memory_stats)

    def _wrap(self, module: ModuleType, package: str, read: Any, reset_own: Callable[..., None]) -> None:
        """Put functions in the place of those of a module and of its package."""

        @functools.wraps(reset_own)
        def reset(device: Any = None) -> None:
            self._discard(device)
            reset_own(device)

        for wrapper in (read, reset):
            for owner in (module, sys.modules.get(package)):
                if getattr(owner, wrapper.__name__, None) is wrapper.__wrapped__:
                    setattr(owner, wrapper.__name__, wrapper)

    def _discard(self, device: Any) -> None:
        """The script resets the peaks: nothing is hidden from now on, and the phase keeps what it has had."""
        if self._hidden:
            index = self._index(device)
            _keep_highest(self._discarded.setdefault(index, {}), _peaks(self._read(index)))
            self._hidden[index] = {}

    def _index(self, device: Any) -> int:
        """The number of a device as torch's functions take it: None, a number, a name or a `torch.device`."""
        torch: Any = sys.modules["torch"]
        if device is None:
            return int(torch.cuda.current_device())
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(torch.cuda.current_device()) if index is None else int(index)


def _with_peaks(statistics: Statistics, prefix: str = "") -> Iterator[tuple[str, dict[str, int]]]:
    """Yield what has a peak, by the names that lead to it, joined as `torch.cuda.memory_stats` joins them."""
    for key, value in statistics.items():
        if isinstance(value, dict):
            name = prefix + (key if isinstance(key, str) else "_".join(map(str, key)))
            if _PEAK in value:
                yield name, value
            else:
                yield from _with_peaks(value, f"{name}.")


def _peaks(statistics: Statistics) -> dict[str, int]:
    return {name: value[_PEAK] for name, value in _with_peaks(statistics)}


def _keep_highest(peaks: dict[str, int], others: dict[str, int]) -> None:
    for name, peak in others.items():
        if peak > peaks.get(name, 0):
            peaks[name] = peak


class DeviceReading(NamedTuple):
    """Figures of one device, in bytes. Peaks are those since the reading before; counters are the
    allocator's.
    """

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

    def release(self) -> None:
        """Return to the device what the allocator holds and no tensor uses."""
        if self._peaks is not None and self._cuda.is_initialized():
            self._cuda.empty_cache()


def _current(statistics: dict[str, Any], name: str) -> int:
    """Allocators other than torch's own lack some statistics."""
    value: int = statistics.get(name, {}).get("all", {}).get("current", 0)
    return value
