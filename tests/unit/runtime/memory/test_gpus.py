"""GPUs as the driver tells them: the real pynvml on a library of our own, with GPUs that are ill."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest
from structlog.testing import capture_logs

from grpo_run.runtime.memory import gpus
from grpo_run.runtime.memory.gpus import GpuWatch
from grpo_run.watchdog.memory.host_sample import GpuSample

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""After a test the thread is ended by an exception."""
DEADLINE_SECONDS = 20.0
DRIVER_NOT_LOADED = 9
DRIVER = """
#include <stdio.h>
#include <string.h>
#include <unistd.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } rates_t;
int loaded = 0, lost = -1, hangs = 0;
static int state(void *gpu) { while (hangs) usleep(10000); return (long)gpu - 1 == lost ? 15 : 0; }
int nvmlInitWithFlags(unsigned int flags) { return loaded; }
const char *nvmlErrorString(int code) { return code == 9 ? "Driver Not Loaded" : "error"; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **gpu) {
    *gpu = (void *)(long)(index + 1); return 0;
}
int nvmlDeviceGetUUID(void *gpu, char *uuid, unsigned int size) {
    snprintf(uuid, size, "GPU-%ld%ld-x", (long)gpu - 1, (long)gpu - 1); return 0;
}
int nvmlDeviceGetMemoryInfo(void *gpu, memory_t *found) {
    found->total = 80; found->used = 10 * (long)gpu; found->free = 0; return state(gpu);
}
int nvmlDeviceGetUtilizationRates(void *gpu, rates_t *found) { found->gpu = 95; return state(gpu); }
int nvmlDeviceGetTemperature(void *gpu, int sensor, unsigned int *found) { *found = 61; return state(gpu); }
int nvmlDeviceGetPowerUsage(void *gpu, unsigned int *found) { *found = 650500; return state(gpu); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *found) {
    *found = (long)gpu == 1 ? 0x1 : 0x04 | 0x40; return state(gpu);
}
int nvmlDeviceGetTotalEccErrors(void *gpu, int kind, int counter, unsigned long long *found) {
    *found = kind == 1 && counter == 0 ? 7 : 0; return (long)gpu == 3 ? 3 : state(gpu);
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled library."""
    folder = tmp_path_factory.mktemp("nvml")
    (folder / "nvml.c").write_text(DRIVER)
    path = folder / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", path, folder / "nvml.c"], check=True, timeout=60)
    return path


class Driver:
    """The library in this process, and what is wrong with it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def set(self, name: str, value: int) -> None:
        """Set a variable of the library."""
        ctypes.c_int.in_dll(self._library, name).value = value


@pytest.fixture
def driver(library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """pynvml has loaded the library. Readings follow one another without a pause."""
    loaded = ctypes.CDLL(str(library))
    monkeypatch.setattr(gpus, "LIBRARY", str(library))
    monkeypatch.setattr(gpus, "READ_SECONDS", 0.01)
    monkeypatch.setattr(pynvml, "nvmlLib", loaded)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    made = Driver(loaded)
    yield made
    for name, value in (("hangs", 0), ("loaded", 0), ("lost", -1)):
        made.set(name, value)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: sys.exit())  # ends the thread
    for thread in threading.enumerate():
        if thread.name == "grpo-run-gpus":
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()


def until(watch: GpuWatch, index: int, **expected: object) -> GpuSample:
    """Wait until the sample of a GPU has these values; return it."""
    ends = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < ends:
        for sample in watch.latest():
            if sample.index == index and all(getattr(sample, k) == v for k, v in expected.items()):
                return sample
        time.sleep(0.01)
    raise AssertionError(watch.latest())


def test_every_figure_of_a_gpu_is_read(driver: Driver) -> None:
    """An idle GPU is not throttled; what a GPU cannot tell is unknown, not 0."""
    watch = GpuWatch({})
    assert until(watch, 0) == GpuSample(
        index=0, utilization=0.95, used_bytes=10, total_bytes=80, temperature_celsius=61, power_watts=650.5,
        throttled=(), uncorrected_errors=7,
    )  # fmt: skip
    assert until(watch, 1).throttled == ("power", "thermal")
    assert until(watch, 2).uncorrected_errors is None


def test_a_gpu_that_is_lost_has_no_old_values(driver: Driver) -> None:
    """The others are read on, and it comes back."""
    watch = GpuWatch({})
    until(watch, 1, observable=True)
    driver.set("lost", 1)
    assert until(watch, 1, observable=False) == GpuSample(index=1, observable=False)
    assert until(watch, 0, observable=True).used_bytes == 10
    driver.set("lost", -1)
    until(watch, 1, observable=True)


def test_a_driver_that_hangs_is_no_healthy_reading_and_nobody_waits_for_it(driver: Driver) -> None:
    """A poll of the supervisor returns at once."""
    now = [100.0]
    watch = GpuWatch({}, clock=lambda: now[0])
    until(watch, 0, observable=True)
    driver.set("hangs", 1)
    time.sleep(0.1)
    now[0] += gpus.STALE_SECONDS + 1
    began = time.monotonic()
    found = watch.latest()
    assert time.monotonic() - began < 20  # the driver never answers
    assert found == tuple(GpuSample(index=index, observable=False) for index in range(3))


@pytest.mark.parametrize(
    ("given", "indices"),
    [(None, [0, 1, 2]), ("2,0", [0, 2]), ("GPU-11", [1]), ("", []), ("MIG-4,MIG-5", [0, 1, 2])],
)
def test_only_gpus_that_the_ranks_see_are_read(driver: Driver, given: str | None, indices: list[int]) -> None:
    """Those of other jobs on the host are not theirs."""
    assert list(gpus.visible(pynvml, given)) == indices


def gone(watch: GpuWatch) -> bool:
    """Whether the thread has ended."""
    ends = time.monotonic() + DEADLINE_SECONDS
    while any(thread is watch._thread for thread in threading.enumerate()) and time.monotonic() < ends:
        time.sleep(0.01)
    return watch._thread is not None and not watch._thread.is_alive()


def test_a_machine_without_a_driver_says_so_once_and_pays_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread ends."""
    monkeypatch.setattr(gpus, "LIBRARY", "libnothing-of-that-name.so.1")
    watch = GpuWatch({})
    with capture_logs() as logs:
        assert watch.latest() == ()
        assert gone(watch)
        assert watch.latest() == ()
    assert [(entry["event"], entry["log_level"]) for entry in logs] == [("gpus_not_observed", "info")]


def test_a_driver_that_is_not_loaded_is_none(driver: Driver) -> None:
    """The library alone is in many containers."""
    driver.set("loaded", DRIVER_NOT_LOADED)
    watch = GpuWatch({})
    with capture_logs() as logs:
        assert watch.latest() == ()
        assert gone(watch)
    assert [entry["error"] for entry in logs] == ["Driver Not Loaded"]
