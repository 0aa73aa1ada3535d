"""The supervisor's samples are of its ranks, and cost no more than they may."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from grpo_run.runtime.memory.host_accounting import SAMPLE_SECONDS, HostMemory
from grpo_run.watchdog.memory.host_sample import HostSample
from grpo_run.watchdog.observation import Exit


def test_samples_are_made_once_a_second_with_every_kind_named() -> None:
    """Ranks, their helpers, snapshots and limits; polls in between read the kill counter only."""
    now = [100.0]
    published: list[HostSample] = []
    host = HostMemory(
        staging_bytes=lambda: 123,
        own_pids=lambda: [os.getpid()],
        publish=published.append,
        clock=lambda: now[0],
    )
    rank = (
        "import os; os.fork() or open('/proc/self/comm','w').write('pt_data_worker'); print(flush=True);"
        " os.read(0, 1)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", rank], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline(), process.stdout.readline()
        host.begin_attempt({0: process.pid})
        for _ in range(10):
            host.poll()
            now[0] += SAMPLE_SECONDS / 5
        assert len(published) == 2
        assert host.latest == published[-1]
        assert host.latest.ranks[0].anonymous_bytes > 1 << 20
        assert host.latest.data_workers_bytes is not None
        assert host.latest.data_workers_bytes > 1 << 20
        assert host.latest.other_helpers_bytes == 0
        assert host.latest.supervisor_bytes > 1 << 20
        assert host.latest.staging_bytes == 123
        assert host.latest.nearest is not None
        process.kill()


def test_a_rank_that_nobody_has_killed_for_memory_is_not_reported() -> None:
    """SIGKILL by this test; the last sample with the rank is kept for the verdict."""
    host = HostMemory(staging_bytes=lambda: 0, own_pids=list)
    with subprocess.Popen(["sleep", "60"]) as process:
        host.begin_attempt({3: process.pid})
        host.poll()
        process.kill()
    killed = Exit(rank=3, pid=process.pid, exit_code=None, signal=signal.SIGKILL, order=0)
    kills = host.kills_of([killed])
    assert kills.ranks == frozenset()
    assert kills.sample is not None
    assert 3 in kills.sample.ranks
