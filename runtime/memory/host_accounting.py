"""Accounting of host memory while ranks run: samples every second or two, and the kernel's kill counter at
every poll.

Called by the supervisor, which allocates nothing on behalf of the ranks: nothing here takes time of a step.
Every kind of reading has a share of one core that it may take; a reading that costs more is made less often.
Decides nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping

from grpo_run.runtime.memory.gpus import GpuWatch
from grpo_run.watchdog.memory import host_reading
from grpo_run.watchdog.memory.cgroups import MemoryCgroup, read_fields
from grpo_run.watchdog.memory.host_kills import KernelKills, KillWatch, reached_limit
from grpo_run.watchdog.memory.host_sample import HostSample
from grpo_run.watchdog.observation import Exit
from grpo_run.watchdog.processes import descendants, read_file, read_processes

SAMPLE_SECONDS = 1.0
HELPERS_SECONDS = 10.0
COST_FRACTION = 0.001
"""Share of one core that samples may take; the helpers are looked for with half of it."""
NEAR = 0.8
"""From this share of a limit on, the rest may be taken within a second."""
NEAR_COST_FRACTION = 0.004
"""Share of one core that samples may take then; no other time between them is kept."""
DATA_WORKER = "pt_data_worker"
"""Name that torch gives to the processes of a data loader."""


class HostMemory:
    """The host's memory during one run. Times are monotonic seconds, except those of samples.

    Args:
        staging_bytes: returns the memory of the run's snapshots.
        own_pids: returns the supervisor's own processes: itself, forkserver, drain worker.
        publish: receives each sample.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        staging_bytes: Callable[[], int],
        own_pids: Callable[[], Collection[int]],
        publish: Callable[[HostSample], None] = lambda sample: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._staging_bytes = staging_bytes
        self._own_pids = own_pids
        self._publish = publish
        self._clock = clock
        self._pids: dict[int, int] = {}
        self._groups: list[MemoryCgroup] = []
        self._counted: MemoryCgroup | None = None
        self._kills = KillWatch()
        self._gpus = GpuWatch()
        self.latest: HostSample | None = None
        """The last sample; None before the first."""
        self._whole: tuple[float, HostSample] | None = None
        """The last sample in which every rank had its memory, and when it was made."""
        self._sample_at = self._helpers_at = 0.0
        self._workers: list[int] = []
        self._others: list[int] = []
        self._helpers_known = False

    def begin_attempt(self, pids: Mapping[int, int]) -> None:
        """Begin to follow the ranks that were just started, by rank."""
        self._pids = dict(pids)
        self._groups = host_reading.groups_of(next(iter(pids.values()), os.getpid()))
        self._counted = next((group for group in self._groups if group.kills() is not None), None)
        self._kills.begin(self._count())
        self._whole = None
        self._sample_at = self._helpers_at = 0.0
        self._workers, self._others, self._helpers_known = [], [], False

    @property
    def last_whole(self) -> HostSample | None:
        """The last sample of this attempt in which every rank had its memory; None if there is none."""
        return None if self._whole is None else self._whole[1]

    @property
    def whole(self) -> HostSample | None:
        """The last sample, if every rank had its memory in it and the kernel has killed nobody in this
        attempt.
        """
        if self._whole is None or self._whole[1] is not self.latest or self._kills.rises:
            return None
        return self.latest

    def poll(self) -> bool:
        """Read what is due; return whether a sample was made."""
        now = self._clock()
        self._record_kills(now)
        if now < self._sample_at:
            return False
        if now >= self._helpers_at:
            self._find_helpers(now)
        began = time.thread_time()
        self._sample(now)
        cost_seconds = time.thread_time() - began
        if self._is_near:
            self._sample_at = now + cost_seconds / NEAR_COST_FRACTION
        else:
            self._sample_at = now + max(SAMPLE_SECONDS, cost_seconds / COST_FRACTION)
        return True

    def kills_of(self, exits: Collection[Exit]) -> KernelKills:
        """Return which of the ranks that have exited the kernel has killed. Call it once their exits were
        seen.
        """
        now = self._clock()
        self._record_kills(now, again=True)
        signalled = {exit.rank for exit in exits if exit.signal == signal.SIGKILL}
        before, after = self._kills.counts()
        at, sample = self._whole if self._whole is not None else (now, None)
        return KernelKills(
            ranks=self._kills.killed(signalled),
            dying=self._kills.dying({exit.rank for exit in exits}),
            helper_killed=self._kills.helper_killed(now),
            before=before,
            now=after,
            sample=sample,
            reached=reached_limit(sample.limits, host_reading.read_limits(self._groups))
            if sample is not None
            else None,
            sample_age_seconds=max(0.0, now - at),
        )

    @property
    def _is_near(self) -> bool:
        nearest = self.latest.nearest if self.latest is not None else None
        return nearest is not None and nearest.fraction >= NEAR

    def _record_kills(self, now: float, *, again: bool = False) -> None:
        self._kills.record(self._count(), now, self._dying, again=again)

    def _dying(self) -> frozenset[int]:
        return frozenset(rank for rank, pid in self._pids.items() if host_reading.is_dying(pid))

    def _count(self) -> int | None:
        if self._counted is not None:
            return self._counted.kills()
        # no cgroup counts: the kernel's counter of the machine
        return read_fields(read_file("/proc/vmstat") or b"").get("oom_kill")

    def _sample(self, now: float) -> None:
        ranks = {
            rank: memory
            for rank, pid in self._pids.items()
            if (memory := host_reading.read_process(pid)) is not None
        }
        shm_used, shm_total = host_reading.read_shared_memory()
        sample = HostSample(
            at=time.time(),
            limits=host_reading.read_limits(self._groups),
            ranks=ranks,
            data_workers_bytes=host_reading.anonymous_bytes(self._workers) if self._helpers_known else None,
            other_helpers_bytes=host_reading.anonymous_bytes(self._others) if self._helpers_known else None,
            supervisor_bytes=host_reading.anonymous_bytes(self._own_pids()),
            staging_bytes=self._staging_bytes(),
            shm_used_bytes=shm_used,
            shm_total_bytes=shm_total,
            full_pressure=self._groups[0].full_pressure() if self._groups else None,
            kills=self._count(),
            cgroup=str(self._groups[0].folder) if self._groups else "",
            gpus=self._gpus.latest(),
        )
        if len(ranks) == len(self._pids):
            self._whole = now, sample
        self.latest = sample
        self._publish(sample)

    def _find_helpers(self, now: float) -> None:
        began = time.thread_time()
        try:
            table = read_processes()
        except OSError:  # no descriptor is left at present
            return
        below = descendants(table, self._pids.values()) - set(self._pids.values())
        self._workers = [pid for pid in below if table[pid].name == DATA_WORKER]
        self._others = [pid for pid in below if table[pid].name != DATA_WORKER]
        self._helpers_known = True
        cost_seconds = time.thread_time() - began
        self._helpers_at = now + max(HELPERS_SECONDS, cost_seconds / (COST_FRACTION / 2))
