"""GPUs of the host as their driver sees them (NVML): use, temperature, throttling, errors of their memory.

Asked by `host_accounting.py` with every sample. The driver is read in a daemon thread, because it may hang;
what it has not answered for long, or has refused, is no reading. Without a driver the thread ends at once,
and says so in the supervisor's log. Allocates nothing on a GPU and decides nothing.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import structlog

from grpo_run.watchdog.gpu_driver import GpuDriverError, gpu_driver
from grpo_run.watchdog.memory.host_sample import GpuSample

READ_SECONDS: Final = 5.0
STALE_SECONDS: Final = 20.0
"""A driver that has not answered for so long is not observed."""
THROTTLED: Final = {"power": 0x04 | 0x80, "thermal": 0x20 | 0x40, "hardware": 0x08}
"""NVML's bits of why clocks are lower than they could be: software's power cap and the power brake; thermal
slowdown of software and of hardware; slowdown of hardware for either reason.
"""
LIBRARY: Final = "libnvidia-ml.so.1"

log = structlog.get_logger(__name__)


class GpuWatch:
    """The GPUs that the ranks of this host may use. Times are monotonic seconds.

    Args:
        environment: of the ranks.
        clock: replaced in tests.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._visible = environment.get("CUDA_VISIBLE_DEVICES")
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._read: tuple[float, tuple[GpuSample, ...]] = clock(), ()

    def latest(self) -> tuple[GpuSample, ...]:
        """Return the last reading, and begin to read with the first call. Never waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="grpo-run-gpus", daemon=True)
            self._thread.start()
        read_at, samples = self._read
        if self._clock() - read_at <= STALE_SECONDS:
            return samples
        return tuple(GpuSample(index=sample.index, observable=False) for sample in samples)

    def _watch(self) -> None:
        try:
            ctypes.CDLL(LIBRARY)  # pynvml would take some MB to find out that there is none
        except OSError as error:
            log.info("gpus_not_observed", error=str(error))
            return
        try:
            with gpu_driver() as nvml:
                indices = visible(nvml, self._visible)
                while indices:
                    self._read = self._clock(), tuple(read_gpu(nvml, index) for index in indices)
                    time.sleep(READ_SECONDS)
        except GpuDriverError as error:
            log.info("gpus_not_observed", error=str(error))


def visible(nvml: Any, given: str | None) -> Sequence[int]:
    """Return the numbers of the GPUs that `CUDA_VISIBLE_DEVICES` names, by number or UUID.

    Args:
        given: its value. None, or one that names parts of GPUs, for all.
    """
    every = range(nvml.nvmlDeviceGetCount())
    if given is None or "MIG-" in given:
        return every
    if "GPU-" not in given:
        return [index for index in every if str(index) in given.replace(" ", "").split(",")]
    uuids = {index: nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(index)) for index in every}
    return [
        index for index in every if str(uuids[index]).startswith(tuple(given.replace(" ", "").split(",")))
    ]


def read_gpu(nvml: Any, index: int) -> GpuSample:
    """Return what the driver says of a GPU; None for what this GPU cannot tell."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError:  # it is lost
        return GpuSample(index=index, observable=False)

    def known(name: str, *arguments: int) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except nvml.NVMLError:
            return None

    rates = known("nvmlDeviceGetUtilizationRates")
    milliwatts = known("nvmlDeviceGetPowerUsage")
    reasons = known("nvmlDeviceGetCurrentClocksThrottleReasons")
    uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return GpuSample(
        index=index,
        utilization=None if rates is None else rates.gpu / 100,
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        temperature_celsius=known("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_watts=None if milliwatts is None else milliwatts / 1000,
        throttled=None
        if reasons is None
        else tuple(reason for reason, bits in THROTTLED.items() if reasons & bits),
        uncorrected_errors=known("nvmlDeviceGetTotalEccErrors", *uncorrected),
    )
