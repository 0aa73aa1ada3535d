"""Metrics of memory: the ranks' by phase and with the cost of cleanup, and the host's.

A part of the table in `catalogue.py`, which says what holds for all metrics. Metrics of ranks, on the
device and on the host, are those that each rank has measured in this attempt, counters those of all attempts;
before its first measurement it exports none. Metrics of the host (limits, usage by process kind, actions
taken under pressure) are those of the supervisor's last sample; without a supervisor on this machine they are
absent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from grpo_run.dashboards.metrics.labels import HELPER, HOST_MEMORY, MEMORY_PHASE, MEMORY_PHASES
from grpo_run.runtime.metrics import RANK, Metric, RunObservation, Sample
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse
from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.observation import Slot


def _measured_slots(observation: RunObservation, *, device: bool) -> Iterator[tuple[Slot, RankMemory]]:
    for slot, memory in zip(observation.slots, observation.status.memory, strict=False):
        if slot is not None and memory is not None and (memory.has_device or not device):
            yield slot, memory


def _measured(observation: RunObservation, *, device: bool) -> Iterator[tuple[str, RankMemory]]:
    for slot, memory in _measured_slots(observation, device=device):
        yield str(slot.rank), memory


def _rank(
    value: Callable[[RankMemory], float], *, device: bool = False
) -> Callable[[RunObservation], Iterator[Sample]]:
    """Read one value per rank that has measured itself; with `device`, per rank with a device."""

    def read(observation: RunObservation) -> Iterator[Sample]:
        for rank, memory in _measured(observation, device=device):
            yield (rank,), value(memory)

    return read


_device = functools.partial(_rank, device=True)


def _phase(
    value: Callable[[PhaseMemory], float], *, device: bool
) -> Callable[[RunObservation], Iterator[Sample]]:
    """Read one value per rank and phase that was measured."""

    def read(observation: RunObservation) -> Iterator[Sample]:
        for rank, memory in _measured(observation, device=device):
            for phase, own in memory.phases.items():
                if phase.name in MEMORY_PHASES:
                    yield (rank, phase.name), value(own)

    return read


def _total(name: str, *, device: bool = False) -> Callable[[RunObservation], Iterator[Sample]]:
    """Read what each rank has counted over all attempts, as `_rank`."""

    def read(observation: RunObservation) -> Iterator[Sample]:
        totals = observation.status.history.ranks
        for slot, memory in _measured_slots(observation, device=device):
            yield (str(slot.rank),), totals.total(slot.rank, slot.attempt, name, getattr(memory, name))

    return read


MEMORY_METRICS: tuple[Metric[RunObservation], ...] = (
    Metric(
        name="grpo_rank_gpu_memory_capacity_bytes", kind="gauge", unit="bytes", labels=(RANK,),
        read=_device(lambda memory: memory.capacity_bytes),
        help="Memory of the rank's GPU.",
    ),
    Metric(
        name="grpo_rank_gpu_memory_allocated_bytes", kind="gauge", unit="bytes", labels=(RANK,),
        read=_device(lambda memory: memory.allocated_bytes),
        help="GPU memory used by tensors of the rank at the end of the phase that it has measured last.",
    ),
    Metric(
        name="grpo_rank_gpu_memory_reserved_bytes", kind="gauge", unit="bytes", labels=(RANK,),
        read=_device(lambda memory: memory.reserved_bytes),
        help="GPU memory that torch's allocator holds for the rank, used or not.",
    ),
    Metric(
        name="grpo_rank_gpu_memory_inactive_split_bytes", kind="gauge", unit="bytes", labels=(RANK,),
        read=_device(lambda memory: memory.inactive_split_bytes),
        help="Unused parts of reserved GPU memory that cannot be returned, because other parts are used.",
    ),
    Metric(
        name="grpo_rank_gpu_memory_peak_bytes", kind="gauge", unit="bytes", labels=(RANK, MEMORY_PHASE),
        read=_phase(lambda memory: memory.peak_allocated_bytes, device=True),
        help="Most GPU memory used by tensors in each phase of this attempt, without the phases inside it.",
    ),
    Metric(
        name="grpo_rank_gpu_alloc_retries_total", kind="counter", unit="count", labels=(RANK,),
        read=_total("retries", device=True),
        help="Allocations of the rank for which torch had to return all its caches first.",
    ),
    Metric(
        name="grpo_rank_gpu_ooms_total", kind="counter", unit="count", labels=(RANK,),
        read=_total("ooms", device=True),
        help="Allocations of the rank that failed for lack of GPU memory, even if the"
        " script continued.",
    ),
    Metric(
        name="grpo_rank_resident_peak_bytes", kind="gauge", unit="bytes", labels=(RANK, MEMORY_PHASE),
        read=_phase(lambda memory: memory.peak_resident_bytes, device=False),
        help="Most host memory of the rank known for each phase of this attempt, shared memory included.",
    ),
    Metric(
        name="grpo_rank_cleanup_freed_bytes_total", kind="counter", unit="bytes", labels=(RANK,),
        read=_total("freed_bytes"),
        help="Host memory that memory cleanup has freed.",
    ),
    Metric(
        name="grpo_rank_cleanup_released_bytes_total", kind="counter", unit="bytes", labels=(RANK,),
        read=_total("released_bytes", device=True),
        help="GPU memory that memory cleanup has returned to the device.",
    ),
    Metric(
        name="grpo_rank_memory_accounting_seconds_total", kind="counter", unit="seconds", labels=(RANK,),
        read=_total("spent_seconds"),
        help="Time the rank spent on measuring its memory.",
    ),
)  # fmt: skip


def _sampled(value: Callable[[HostSample], float | None]) -> Callable[[RunObservation], Iterator[Sample]]:
    def read(observation: RunObservation) -> Iterator[Sample]:
        sample = observation.status.host_memory
        yield (), None if sample is None else value(sample)

    return read


def _nearest(value: Callable[[LimitUse], float]) -> Callable[[RunObservation], Iterator[Sample]]:
    return _sampled(lambda sample: None if sample.nearest is None else value(sample.nearest))


def _ranks(observation: RunObservation) -> Iterator[Sample]:
    sample = observation.status.host_memory
    for rank, slot in observation.readable():
        memory = sample.ranks.get(slot.rank) if sample is not None else None
        if memory is not None:
            yield (rank, "anonymous"), memory.anonymous_bytes
            yield (rank, "file"), memory.file_bytes
            yield (rank, "shared"), memory.shared_bytes
            yield (rank, "pinned"), memory.pinned_bytes


def _helpers(observation: RunObservation) -> Iterator[Sample]:
    sample = observation.status.host_memory
    if sample is not None:
        yield ("data_workers",), sample.data_workers_bytes
        yield ("other",), sample.other_helpers_bytes
        yield ("grpo_run",), sample.supervisor_bytes


HOST_MEMORY_METRICS: tuple[Metric[RunObservation], ...] = (
    Metric(
        name="grpo_host_memory_limit_bytes", kind="gauge", unit="bytes",
        read=_nearest(lambda use: use.limit_bytes),
        help="The limit on host memory that is nearest to being reached: of a memory cgroup, or of"
        " the machine.",
    ),
    Metric(
        name="grpo_host_memory_working_set_bytes", kind="gauge", unit="bytes",
        read=_nearest(lambda use: use.working_set_bytes),
        help="What is used of that limit and cannot be freed by dropping page cache.",
    ),
    Metric(
        name="grpo_host_memory_usage_bytes", kind="gauge", unit="bytes",
        read=_nearest(lambda use: use.usage_bytes),
        help="What is charged to that limit, page cache included.",
    ),
    Metric(
        name="grpo_host_memory_full_pressure_ratio", kind="gauge", unit="ratio",
        read=_sampled(lambda sample: sample.full_pressure),
        help="Share of the last 10 s in which every process of the ranks' cgroup waited for memory; cgroup"
        " version 2 only.",
    ),
    Metric(
        name="grpo_rank_host_memory_bytes", kind="gauge", unit="bytes", labels=(RANK, HOST_MEMORY),
        read=_ranks,
        help="Host memory of the rank by kind. Shared memory counts in every rank that maps it.",
    ),
    Metric(
        name="grpo_helper_memory_bytes", kind="gauge", unit="bytes", labels=(HELPER,), read=_helpers,
        help="Anonymous memory of data-loader workers, of other processes that ranks have started, and of"
        " grpo-run itself.",
    ),
    Metric(
        name="grpo_snapshot_memory_bytes", kind="gauge", unit="bytes",
        read=_sampled(lambda sample: sample.staging_bytes),
        help="Memory of the run's snapshots.",
    ),
    Metric(
        name="grpo_shared_memory_used_bytes", kind="gauge", unit="bytes",
        read=_sampled(lambda sample: sample.shm_used_bytes if sample.shm_total_bytes else None),
        help="Used space of /dev/shm, by all its users.",
    ),
    Metric(
        name="grpo_shared_memory_size_bytes", kind="gauge", unit="bytes",
        read=_sampled(lambda sample: sample.shm_total_bytes or None), help="Size of /dev/shm.",
    ),
    Metric(
        name="grpo_host_memory_short_total", kind="counter", unit="count",
        read=lambda run: iter([((), float(run.status.history.memory_restarts.short))]),
        help="How often host memory has become short, so that snapshots and caches were freed.",
    ),
    Metric(
        name="grpo_host_memory_restarts_total", kind="counter", unit="count",
        read=lambda run: iter([((), float(run.status.history.memory_restarts.count))]),
        help="Restarts of ranks that saved and exited before host memory ran out.",
    ),
)  # fmt: skip
