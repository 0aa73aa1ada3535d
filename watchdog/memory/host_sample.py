"""A sample of host memory at one moment. Plain data with a JSON form; made by `runtime/supervisor`.

Shown by `grpo-run status` and the metrics, quoted by the verdict on a rank that the kernel has killed, and
kept in a file, so that the next launch finds it. Does not read anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_run.watchdog.text import size_text


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitUse:
    """One limit on memory, and how much of it is used.

    Attributes:
        name: of the limit, for sentences: "the memory cgroup …" or "the machine's memory".
        working_set_bytes: what is used and cannot be freed by dropping page cache.
        shared_bytes: the part of it that is shared memory and files in tmpfs, snapshots included.
        hits: how often an allocation has met the limit; None if unknown.
    """

    name: str
    limit_bytes: int
    usage_bytes: int
    working_set_bytes: int
    shared_bytes: int = 0
    hits: int | None = None

    @property
    def fraction(self) -> float:
        """Share of the limit that the working set takes."""
        return self.working_set_bytes / self.limit_bytes if self.limit_bytes else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMemory:
    """Memory of one process, as /proc/PID/status counts it.

    Attributes:
        anonymous_bytes: RssAnon: its own, not of any file.
        file_bytes: RssFile: pages of mapped files, which the kernel can free.
        shared_bytes: RssShmem: tmpfs and shared memory, counted in every process that maps it; snapshots are
            a part.
        pinned_bytes: VmLck and VmPin: cannot be moved or freed. What an accelerator's driver pins may be
            missing.
    """

    anonymous_bytes: int
    file_bytes: int
    shared_bytes: int
    pinned_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSample:
    """What the driver says of one GPU; None for what it does not.

    Attributes:
        index: of the driver, which counts all GPUs of the host.
        observable: whether the driver answers for this GPU.
        utilization: share of the time in which a kernel ran.
        throttled: why clocks are lower than they could be: `power`, `thermal`, `hardware`.
        uncorrected_errors: of memory (ECC), since the driver was loaded.
    """

    index: int
    observable: bool = True
    utilization: float | None = None
    used_bytes: int | None = None
    total_bytes: int | None = None
    temperature_celsius: float | None = None
    power_watts: float | None = None
    throttled: tuple[str, ...] | None = None
    uncorrected_errors: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSample:
    """One sample of the host's memory, and of its GPUs.

    Attributes:
        at: seconds since the epoch.
        limits: of the machine and of every memory cgroup of the ranks that has one, the nearest to its limit
            first.
        ranks: memory of each local rank.
        data_workers_bytes: anonymous memory of the ranks' data-loader workers; None until they were looked
            for.
        other_helpers_bytes: the same of everything else that the ranks have started.
        supervisor_bytes: anonymous memory of the supervisor, the forkserver and the drain worker.
        staging_bytes: files of this run's snapshots in memory.
        shm_used_bytes, shm_total_bytes: the file system /dev/shm; 0 if there is none.
        full_pressure: share of the last 10 s in which every task of the ranks' cgroup waited for memory; None
            if unknown.
        kills: the kernel's counter of killed processes of the ranks' cgroup; None if unknown.
        cgroup: folder of that cgroup; empty if unknown.
        gpus: those that ranks of this host may use; empty without a driver.
    """

    at: float
    limits: tuple[LimitUse, ...] = ()
    ranks: Mapping[int, ProcessMemory] = field(default_factory=dict)
    data_workers_bytes: int | None = None
    other_helpers_bytes: int | None = None
    supervisor_bytes: int = 0
    staging_bytes: int = 0
    shm_used_bytes: int = 0
    shm_total_bytes: int = 0
    full_pressure: float | None = None
    kills: int | None = None
    cgroup: str = ""
    gpus: tuple[GpuSample, ...] = ()

    @property
    def nearest(self) -> LimitUse | None:
        """The limit of which the working set takes the largest share; None if no limit is known."""
        return self.limits[0] if self.limits else None


def describe_use(sample: HostSample, limit: LimitUse | None = None) -> str:
    """Return what uses the memory, the largest first: `rank 1 310 MiB, rank 0 201 MiB, snapshots in memory 40
    MiB`.

    Args:
        limit: whose other shared memory is named too.
    """
    parts = [(one.anonymous_bytes, f"rank {rank}") for rank, one in sample.ranks.items()]
    parts.append((sample.data_workers_bytes or 0, "data-loader workers"))
    parts.append((sample.other_helpers_bytes or 0, "other processes of the ranks"))
    parts.append((sample.staging_bytes, "snapshots in memory"))
    if limit is not None:
        parts.append((limit.shared_bytes - sample.staging_bytes, "other shared memory"))
    parts.append((sample.supervisor_bytes, "grpo-run"))
    shown = sorted((part for part in parts if part[0] >= LEAST_SHOWN_BYTES), reverse=True)[:MOST_SHOWN]
    return ", ".join(f"{name} {size_text(size)}" for size, name in shown)


LEAST_SHOWN_BYTES = 1 << 20
MOST_SHOWN = 6
