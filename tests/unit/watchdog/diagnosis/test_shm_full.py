"""A rank that SIGBUS has killed is `shm_full` only if /dev/shm was full."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.shm_full import diagnose_shm_full
from grpo_run.watchdog.host_memory.kills import KernelKills
from grpo_run.watchdog.host_memory.sample import HostSample
from grpo_run.watchdog.observation import Exit, Slot

MEBIBYTE = 1 << 20
FULL = KernelKills(
    sample=HostSample(at=0.0, shm_used_bytes=64 * MEBIBYTE, shm_total_bytes=64 * MEBIBYTE),
    sample_age_seconds=0.4,
)


def test_sigbus_with_a_full_shared_memory_is_named(
    make_exit: Callable[..., Exit], make_slot: Callable[..., Slot]
) -> None:
    """With its size; another signal, or space left, is something else."""
    slots = {1: make_slot(1)}
    bus = [make_exit(1, signal=signal.SIGBUS)]
    verdict = diagnose_shm_full(bus, slots, FULL, best_position=(1, 7))
    assert verdict is not None
    assert verdict.cause is Cause.shm_full
    assert verdict.sentence == (
        "Rank 1 was killed by SIGBUS in step 8 (phase generate), because /dev/shm was full: 64 MiB of 64 MiB were in use"
        " 0.4 s before."
    )
    assert diagnose_shm_full([make_exit(1, signal=signal.SIGSEGV)], slots, FULL, best_position=(1, 7)) is None
    assert FULL.sample is not None
    wide = dataclasses.replace(FULL, sample=dataclasses.replace(FULL.sample, shm_used_bytes=60 * MEBIBYTE))
    assert diagnose_shm_full(bus, slots, wide, best_position=(1, 7)) is None
    assert diagnose_shm_full(bus, slots, KernelKills(), best_position=(1, 7)) is None
