"""Memory of the node: /proc, cgroups and the GPU driver."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest

from grpo_run.watchdog.evidence._node_memory import read_gpu_memory, read_node_memory


class NVMLError(Exception):
    """Stands for `NVMLError`."""


class NoLibrary(NVMLError):
    """Stands for `NVMLError_LibraryNotFound`."""


class NoDriver(NVMLError):
    """Stands for `NVMLError_DriverNotLoaded`."""


def driver(**changes: Any) -> types.ModuleType:
    """`pynvml` with two GPUs, the second one used by process 7."""
    module = types.ModuleType("pynvml")
    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetMemoryInfo": lambda handle: types.SimpleNamespace(used=10 * handle, total=80),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: (
            [types.SimpleNamespace(pid=7, usedGpuMemory=9)] if handle else []
        ),
    }
    errors = {
        "NVMLError": NVMLError,
        "NVMLError_LibraryNotFound": NoLibrary,
        "NVMLError_DriverNotLoaded": NoDriver,
    }
    for name, value in {**functions, **errors, **changes}.items():
        setattr(module, name, value)
    return module


def failing(error: Exception) -> Any:
    """A call that raises."""

    def call(*arguments: object) -> None:
        raise error

    return call


def test_node_memory_is_read() -> None:
    """For a running process and for one that has exited."""
    for pid in (os.getpid(), 2**22 + 1):
        assert b"MemAvailable:" in read_node_memory(pid)


def test_every_gpu_is_listed_with_its_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are in bytes."""
    monkeypatch.setitem(sys.modules, "pynvml", driver())
    assert read_gpu_memory() == {
        "devices": [
            {"index": 0, "used_bytes": 0, "total_bytes": 80, "processes": []},
            {"index": 1, "used_bytes": 10, "total_bytes": 80, "processes": [{"pid": 7, "used_bytes": 9}]},
        ]
    }


@pytest.mark.parametrize("error", [NoLibrary("none"), NoDriver("none")])
def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A machine without GPUs lacks nothing."""
    monkeypatch.setitem(sys.modules, "pynvml", driver(nvmlInit=failing(error)))
    assert read_gpu_memory() == {"devices": []}


@pytest.mark.parametrize("name", ["nvmlInit", "nvmlDeviceGetMemoryInfo", "nvmlShutdown"])
def test_a_driver_error_is_reported(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It must not look like a machine without GPUs."""
    monkeypatch.setitem(sys.modules, "pynvml", driver(**{name: failing(NVMLError("GPU is lost"))}))
    assert read_gpu_memory() == {"error": "GPU is lost"}
