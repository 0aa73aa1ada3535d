"""Metrics of host memory: limits, usage by process kind, and actions taken under pressure.

A part of the table in `catalogue.py`, which says what holds for all metrics. The values are those of the supervisor's last
sample; without a supervisor on this machine they are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from grpo_run.dashboards.metrics.labels import HELPER, HOST_MEMORY, RANK
from grpo_run.dashboards.metrics.metric import Metric, Observation, Sample
from grpo_run.watchdog.host_memory.sample import HostSample, LimitUse


def _sampled(value: Callable[[HostSample], float | None]) -> Callable[[Observation], Iterator[Sample]]:
    def read(observation: Observation) -> Iterator[Sample]:
        sample = observation.status.host_memory
        yield (), None if sample is None else value(sample)

    return read


def _nearest(value: Callable[[LimitUse], float]) -> Callable[[Observation], Iterator[Sample]]:
    return _sampled(lambda sample: None if sample.nearest is None else value(sample.nearest))


def _ranks(observation: Observation) -> Iterator[Sample]:
    sample = observation.status.host_memory
    for rank, slot in observation.readable():
        memory = sample.ranks.get(slot.rank) if sample is not None else None
        if memory is not None:
            yield (rank, "anonymous"), memory.anonymous_bytes
            yield (rank, "file"), memory.file_bytes
            yield (rank, "shared"), memory.shared_bytes
            yield (rank, "pinned"), memory.pinned_bytes
            yield (rank, "proportional"), memory.pss_bytes


def _helpers(observation: Observation) -> Iterator[Sample]:
    sample = observation.status.host_memory
    if sample is not None:
        yield ("data_workers",), sample.data_workers_bytes
        yield ("other",), sample.other_helpers_bytes
        yield ("grpo_run",), sample.supervisor_bytes


HOST_MEMORY_METRICS: tuple[Metric[Observation], ...] = (
    Metric(
        name="grpo_host_memory_limit_bytes", kind="gauge", unit="bytes", read=_nearest(lambda use: use.limit_bytes),
        help="The limit on host memory that is nearest to being reached: of a memory cgroup, or of the machine.",
    ),
    Metric(
        name="grpo_host_memory_working_set_bytes", kind="gauge", unit="bytes",
        read=_nearest(lambda use: use.working_set_bytes),
        help="What is used of that limit and cannot be freed by dropping page cache.",
    ),
    Metric(
        name="grpo_host_memory_usage_bytes", kind="gauge", unit="bytes", read=_nearest(lambda use: use.usage_bytes),
        help="What is charged to that limit, page cache included.",
    ),
    Metric(
        name="grpo_host_memory_full_pressure_ratio", kind="gauge", unit="ratio",
        read=_sampled(lambda sample: sample.full_pressure),
        help="Share of the last 10 s in which every process of the ranks' cgroup waited for memory; cgroup version 2 only.",
    ),
    Metric(
        name="grpo_rank_host_memory_bytes", kind="gauge", unit="bytes", labels=(RANK, HOST_MEMORY), read=_ranks,
        help="Host memory of the rank by kind. Shared memory counts in every rank that maps it, except in `proportional`.",
    ),
    Metric(
        name="grpo_helper_memory_bytes", kind="gauge", unit="bytes", labels=(HELPER,), read=_helpers,
        help="Anonymous memory of data-loader workers, of other processes that ranks have started, and of grpo-run itself.",
    ),
    Metric(
        name="grpo_snapshot_memory_bytes", kind="gauge", unit="bytes", read=_sampled(lambda sample: sample.staging_bytes),
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
