"""What a script reads of the allocator's peaks does not change when phases begin peaks of their own.

The functions are torch's own; only `torch._C`, which needs a GPU, is replaced. No GPU has run this.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.allocator import Allocator

from grpo_run.runtime.rank.memory.device import DeviceMemory

CUDA_FUNCTIONS = ("memory_stats_as_nested_dict", "reset_peak_memory_stats")
ACCELERATOR_FUNCTIONS = ("memory_stats", "reset_peak_memory_stats")


def index_of(device: Any, optional: bool = False) -> int:
    """The number of a device, as torch finds it where there is one."""
    return device if isinstance(device, int) else torch.device(device or "cuda").index or 0


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    """A GPU's allocator behind torch's functions, on two devices of which the first is the current one."""
    made = Allocator()
    memory = importlib.import_module("torch.cuda.memory")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(memory, "_get_device_index", index_of)
    properties = type("Properties", (), {"total_memory": 80_000})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", made.statistics, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_resetPeakMemoryStats", made.reset, raising=False)
    return made


@pytest.fixture
def device(allocator: Allocator) -> Iterator[DeviceMemory]:
    """The rank's reader, connected to torch; torch is as before afterwards."""
    memory = importlib.import_module("torch.cuda.memory")
    owners = [(memory, CUDA_FUNCTIONS), (torch.cuda, CUDA_FUNCTIONS)]
    before = [(owner, name, getattr(owner, name)) for owner, names in owners for name in names]
    made = DeviceMemory()
    made.connect(memory)
    yield made
    for owner, name, value in before:
        setattr(owner, name, value)


READERS: dict[str, Callable[[], int]] = {
    "max_memory_allocated": lambda: torch.cuda.max_memory_allocated(),
    "memory_stats": lambda: int(torch.cuda.memory_stats()["allocated_bytes.all.peak"]),
    "nested": lambda: int(torch.cuda.memory_stats_as_nested_dict("cuda")["allocated_bytes"]["all"]["peak"]),
    "of a device": lambda: torch.cuda.max_memory_allocated(torch.device("cuda", 0)),
    "by number": lambda: torch.cuda.max_memory_allocated(0),
    "module": lambda: torch.cuda.memory.max_memory_allocated("cuda:0"),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_script_sees_the_peak_of_all_phases(
    read: Callable[[], int], device: DeviceMemory, allocator: Allocator
) -> None:
    """As if nothing had been reset; each phase has its own."""
    peaks = []
    for size in (300, 900, 500):
        allocator.rise(size)
        reading = device.read()
        assert reading is not None
        peaks.append(reading.peak_allocated)
    assert allocator.resets == 3
    assert peaks == [300, 900, 500]
    assert read() == 900
    allocator.rise(1200)
    assert read() == 1200


def test_what_is_in_use_now_is_a_part_of_the_next_peak(device: DeviceMemory, allocator: Allocator) -> None:
    """A phase that allocates nothing has the peak of what it has found."""
    allocator.set(700)
    device.read()
    reading = device.read()
    assert reading is not None
    assert (reading.allocated, reading.peak_allocated, reading.capacity) == (700, 700, 80_000)


def test_a_script_that_resets_peaks_sees_those_since_its_reset(
    device: DeviceMemory, allocator: Allocator
) -> None:
    """As without us. The phase in which it resets keeps the peak that it had before."""
    allocator.rise(900)
    device.read()
    allocator.rise(600)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    allocator.rise(700)
    torch.cuda.reset_peak_memory_stats()
    allocator.rise(200)
    assert torch.cuda.max_memory_allocated() == 200
    reading = device.read()
    assert reading is not None
    assert reading.peak_allocated == 700
    assert torch.cuda.max_memory_allocated() == 200


def test_other_peaks_and_other_devices_are_left_alone(device: DeviceMemory, allocator: Allocator) -> None:
    """Every statistic has its own peak; only the current device is reset."""
    allocator.rise(50, device=1)
    allocator.rise(2000, name="reserved_bytes")
    allocator.rise(900)
    device.read()
    assert torch.cuda.max_memory_allocated(1) == 50
    assert torch.cuda.max_memory_reserved() == 2000
    assert torch.cuda.max_memory_allocated() == 900
    torch.cuda.reset_peak_memory_stats(1)
    assert torch.cuda.max_memory_allocated() == 900


def test_the_accelerators_functions_show_the_same_peaks(
    device: DeviceMemory, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.accelerator` reads the statistics of the same allocator by functions of its own."""
    module: Any = importlib.import_module("torch.accelerator.memory")
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    monkeypatch.setattr(torch._C, "_accelerator_getDeviceStats", allocator.statistics)
    monkeypatch.setattr(torch._C, "_accelerator_resetPeakStats", allocator.reset)
    monkeypatch.setattr(module, "_get_device_index", index_of)
    for owner in (module, torch.accelerator):
        for name in ACCELERATOR_FUNCTIONS:
            monkeypatch.setattr(owner, name, getattr(owner, name))  # restored afterwards
    device.connect_accelerator(module)
    allocator.rise(900)
    device.read()
    assert torch.accelerator.max_memory_allocated() == 900
    assert torch.accelerator.max_memory_allocated(1) == 0
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == 0
    assert torch.cuda.max_memory_allocated() == 0


def test_nothing_changes_without_a_device() -> None:
    """The wrapped functions return what torch returns, and reading initializes nothing."""
    made = DeviceMemory()
    assert made.read() is None
    assert torch.cuda.memory_stats() == {}
    assert torch.cuda.max_memory_allocated() == 0
    assert not torch.cuda.is_initialized()
