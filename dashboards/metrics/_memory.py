"""Metrics of memory: the ranks' by phase and with the cost of cleanup, and the host's.

A part of the table in `catalogue.py`, which says what holds for all metrics. Metrics of ranks, on the
device and on the host, are those that each rank has measured in this attempt, counters those of all attempts;
before its first measurement it exports none. Metrics of the host (limits, usage by process kind, actions
taken under pressure) are those of the supervisor's last sample; without a supervisor on this machine they are
absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from grpo_run.runtime.metrics import Metric, RunObservation, Values, counter, gauge
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse
from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.observation import Phase, Slot

MEMORY_PHASES = (
    Phase.startup, Phase.generate, Phase.score, Phase.forward_backward, Phase.optimizer, Phase.checkpoint,
    Phase.eval,
)  # fmt: skip
"""The phases in which a rank allocates much. The memory of the others is in `grpo-run status --json`."""


def _measured(run: RunObservation, *, device: bool) -> Iterator[tuple[Slot, RankMemory]]:
    """Yield each rank that has measured itself; with `device`, each with a device."""
    for slot, memory in zip(run.slots, run.status.memory, strict=False):
        if slot is not None and memory is not None and (memory.has_device or not device):
            yield slot, memory


def _device(value: Callable[[RankMemory], float]) -> Callable[[RunObservation], Values]:
    """Read one value per rank with a device."""
    return lambda run: {str(slot.rank): value(memory) for slot, memory in _measured(run, device=True)}


def _phase(value: Callable[[PhaseMemory], float], *, device: bool) -> Callable[[RunObservation], Values]:
    """Read one value per rank and phase that was measured."""
    return lambda run: {
        (str(slot.rank), phase.name): value(own)
        for slot, memory in _measured(run, device=device)
        for phase, own in memory.phases.items()
        if phase in MEMORY_PHASES
    }


def _total(name: str, *, device: bool = False) -> Callable[[RunObservation], Values]:
    """Read what each rank has counted over all attempts."""
    return lambda run: {
        str(slot.rank): run.history.ranks.total(slot.rank, slot.attempt, name, getattr(memory, name))
        for slot, memory in _measured(run, device=device)
    }


MEMORY_METRICS: tuple[Metric[RunObservation], ...] = (
    gauge("grpo_rank_gpu_memory_capacity_bytes", "bytes", _device(lambda memory: memory.capacity_bytes),
          "Memory of the rank's GPU.", "rank"),
    gauge("grpo_rank_gpu_memory_allocated_bytes", "bytes", _device(lambda memory: memory.allocated_bytes),
          "GPU memory used by tensors of the rank at the end of the phase that it has measured last.",
          "rank"),
    gauge("grpo_rank_gpu_memory_reserved_bytes", "bytes", _device(lambda memory: memory.reserved_bytes),
          "GPU memory that torch's allocator holds for the rank, used or not.", "rank"),
    gauge("grpo_rank_gpu_memory_inactive_split_bytes", "bytes",
          _device(lambda memory: memory.inactive_split_bytes),
          "Unused parts of reserved GPU memory that cannot be returned, because other parts are used.",
          "rank"),
    gauge("grpo_rank_gpu_memory_peak_bytes", "bytes",
          _phase(lambda memory: memory.peak_allocated_bytes, device=True),
          "Most GPU memory used by tensors in each phase of this attempt, without the phases inside it.",
          "rank", "phase"),
    counter("grpo_rank_gpu_alloc_retries_total", "count", _total("retries", device=True),
            "Allocations of the rank for which torch had to return all its caches first.", "rank"),
    counter("grpo_rank_gpu_ooms_total", "count", _total("ooms", device=True),
            "Allocations of the rank that failed for lack of GPU memory, even if the script continued.",
            "rank"),
    gauge("grpo_rank_resident_peak_bytes", "bytes",
          _phase(lambda memory: memory.peak_resident_bytes, device=False),
          "Most host memory of the rank known for each phase of this attempt, shared memory included.",
          "rank", "phase"),
    counter("grpo_rank_cleanup_freed_bytes_total", "bytes", _total("freed_bytes"),
            "Host memory that memory cleanup has freed.", "rank"),
    counter("grpo_rank_cleanup_released_bytes_total", "bytes", _total("released_bytes", device=True),
            "GPU memory that memory cleanup has returned to the device.", "rank"),
    counter("grpo_rank_memory_accounting_seconds_total", "seconds", _total("spent_seconds"),
            "Time the rank spent on measuring its memory.", "rank"),
)  # fmt: skip


def _sampled(value: Callable[[HostSample], float | None]) -> Callable[[RunObservation], float | None]:
    """Read one value of the last sample of the host's memory."""

    def read(run: RunObservation) -> float | None:
        return None if run.status.host_memory is None else value(run.status.host_memory)

    return read


def _nearest(value: Callable[[LimitUse], float]) -> Callable[[RunObservation], float | None]:
    """Read one value of the limit that is nearest to being reached."""
    return _sampled(lambda sample: None if sample.nearest is None else value(sample.nearest))


def _ranks(run: RunObservation) -> Values:
    sample = run.status.host_memory
    found: dict[tuple[str, str], float] = {}
    for rank, slot in run.readable():
        memory = sample.ranks.get(slot.rank) if sample is not None else None
        if memory is not None:
            found[rank, "anonymous"] = memory.anonymous_bytes
            found[rank, "file"] = memory.file_bytes
            found[rank, "shared"] = memory.shared_bytes
            found[rank, "pinned"] = memory.pinned_bytes
    return found


def _helpers(run: RunObservation) -> Values:
    sample = run.status.host_memory
    if sample is None:
        return {}
    return {
        "data_workers": sample.data_workers_bytes,
        "other": sample.other_helpers_bytes,
        "grpo_run": sample.supervisor_bytes,
    }


HOST_MEMORY_METRICS: tuple[Metric[RunObservation], ...] = (
    gauge("grpo_host_memory_limit_bytes", "bytes", _nearest(lambda use: use.limit_bytes),
          "The limit on host memory that is nearest to being reached: of a memory cgroup, or of the"
          " machine."),
    gauge("grpo_host_memory_working_set_bytes", "bytes", _nearest(lambda use: use.working_set_bytes),
          "What is used of that limit and cannot be freed by dropping page cache."),
    gauge("grpo_host_memory_usage_bytes", "bytes", _nearest(lambda use: use.usage_bytes),
          "What is charged to that limit, page cache included."),
    gauge("grpo_host_memory_full_pressure_ratio", "ratio", _sampled(lambda sample: sample.full_pressure),
          "Share of the last 10 s in which every process of the ranks' cgroup waited for memory; cgroup"
          " version 2 only."),
    gauge("grpo_rank_host_memory_bytes", "bytes", _ranks,
          "Host memory of the rank by kind. Shared memory counts in every rank that maps it.",
          "rank", "kind"),
    gauge("grpo_helper_memory_bytes", "bytes", _helpers,
          "Anonymous memory of data-loader workers, of other processes that ranks have started, and of"
          " grpo-run itself.", "helper"),
    gauge("grpo_snapshot_memory_bytes", "bytes", _sampled(lambda sample: sample.staging_bytes),
          "Memory of the run's snapshots."),
    gauge("grpo_shared_memory_used_bytes", "bytes",
          _sampled(lambda sample: sample.shm_used_bytes if sample.shm_total_bytes else None),
          "Used space of /dev/shm, by all its users."),
    gauge("grpo_shared_memory_size_bytes", "bytes", _sampled(lambda sample: sample.shm_total_bytes or None),
          "Size of /dev/shm."),
    counter("grpo_host_memory_short_total", "count", lambda run: run.history.memory_shortages,
            "How often host memory has become short, so that snapshots and caches were freed."),
)  # fmt: skip
