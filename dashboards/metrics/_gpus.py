"""Metrics of the GPUs of this host, as their driver sees them (NVML).

A part of the table in `catalogue.py`, which says what holds for all metrics. They are those of the
supervisor's last sample of the host; without a driver there are none. A GPU for which the driver does not
answer has `grpo_gpu_observable` 0 and nothing else. The label is the driver's number, not a rank: a rank may
use several GPUs, and a rollout server has its own.
"""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.runtime.memory.gpus import THROTTLED
from grpo_run.runtime.metrics import Metric, RunObservation, Values, counter, gauge
from grpo_run.watchdog.memory.host_sample import GpuSample


def _gpus(run: RunObservation) -> tuple[GpuSample, ...]:
    return () if run.status.host_memory is None else run.status.host_memory.gpus


def _gpu(value: Callable[[GpuSample], float | None]) -> Callable[[RunObservation], Values]:
    return lambda run: {str(gpu.index): value(gpu) for gpu in _gpus(run)}


def _throttled(run: RunObservation) -> Values:
    return {
        (str(gpu.index), reason): reason in gpu.throttled
        for gpu in _gpus(run)
        if gpu.throttled is not None
        for reason in THROTTLED
    }


GPU_METRICS: tuple[Metric[RunObservation], ...] = (
    gauge("grpo_gpu_observable", "boolean", _gpu(lambda gpu: gpu.observable),
          "1 if the driver answers for the GPU, 0 if it is lost or the driver hangs.", "gpu"),
    gauge("grpo_gpu_utilization_ratio", "ratio", _gpu(lambda gpu: gpu.utilization),
          "Share of the last second or less in which a kernel ran on the GPU.", "gpu"),
    gauge("grpo_gpu_memory_used_bytes", "bytes", _gpu(lambda gpu: gpu.used_bytes),
          "Memory of the GPU in use, by all its processes.", "gpu"),
    gauge("grpo_gpu_memory_total_bytes", "bytes", _gpu(lambda gpu: gpu.total_bytes),
          "Memory of the GPU.", "gpu"),
    gauge("grpo_gpu_temperature_celsius", "celsius", _gpu(lambda gpu: gpu.temperature_celsius),
          "Temperature of the GPU.", "gpu"),
    gauge("grpo_gpu_power_watts", "watts", _gpu(lambda gpu: gpu.power_watts),
          "Power that the GPU draws.", "gpu"),
    gauge("grpo_gpu_throttled", "boolean", _throttled,
          "1 while the clocks of the GPU are lowered for this reason: its power limit, its temperature, or"
          " a slowdown by hardware.", "gpu", "reason"),
    counter("grpo_gpu_ecc_uncorrected_total", "count", _gpu(lambda gpu: gpu.uncorrected_errors),
            "Errors of the GPU's memory that could not be corrected, since its driver was loaded.", "gpu"),
)  # fmt: skip
