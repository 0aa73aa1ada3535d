"""A rank that the kernel killed is `host_oom` with the numbers; a bare SIGKILL never is."""

from __future__ import annotations

import signal

import pytest
from support.builders.watchdog.failed_ranks import make_error, make_exit
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.host_oom import diagnose_host_oom
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.memory.host_sample import HostSample, LimitUse, ProcessMemory

MEBIBYTE = 1 << 20
LIMIT = LimitUse(
    name="the memory cgroup /job", limit_bytes=700 * MEBIBYTE, usage_bytes=690 * MEBIBYTE,
    working_set_bytes=660 * MEBIBYTE
)  # fmt: skip
SAMPLE = HostSample(
    at=1000.0,
    limits=(LIMIT,),
    ranks={1: ProcessMemory(anonymous_bytes=310 * MEBIBYTE, file_bytes=0, shared_bytes=0)},
)
KILLED = KernelKills(ranks=frozenset({1}), helper_killed=True, before=2, now=3, sample=SAMPLE, reached=LIMIT,
sample_age_seconds=0.3)  # fmt: skip


def test_the_verdict_has_the_numbers() -> None:
    """Who, where, which limit, who used it, and the counter that proves it; the peer's error is not the
    cause.
    """
    exits = [
        make_exit(0, order=0, error=make_error(type="RuntimeError", message="Connection closed by peer")),
        make_exit(1, order=1, signal=signal.SIGKILL),
    ]
    verdict = diagnose_host_oom(
        exits, {rank: make_slot(rank) for rank in range(2)}, KILLED, best_position=(1, 7)
    )
    assert verdict is not None
    assert (verdict.cause, verdict.culprits, verdict.waiters) == (Cause.host_oom, (1,), (0,))
    assert verdict.confidence == "proved"
    assert not verdict.deterministic
    assert verdict.sentence == (
        "Rank 1 was killed by the kernel in step 8 (phase generate), because memory was full. The memory"
        " cgroup /job had 660 MiB of 700 MiB in use 0.3 s before. Large users then: rank 1 310 MiB. The"
        " kernel's counter of killed processes rose from 2 to 3."
    )


def test_a_bare_sigkill_is_not_host_oom() -> None:
    """Another process was killed at another time, and a user killed the rank."""
    kills = KernelKills(helper_killed=True, before=0, now=1, sample=SAMPLE)
    exits = [make_exit(1, signal=signal.SIGKILL)]
    assert diagnose_host_oom(exits, {1: make_slot(1)}, kills, best_position=(1, 7)) is None


@pytest.mark.parametrize(
    "message",
    [
        "DataLoader worker (pid 4182) is killed by signal: Killed. ",
        "A process in the process pool was terminated abruptly while the future was running or pending.",
        "Command '['sort']' died with <Signals.SIGKILL: 9>.",
        "engine core exited with code -9",
    ],
)
def test_a_helper_that_the_kernel_killed_is_named(message: str) -> None:
    """Its rank raises an exception; only with a rise of the counter is it for lack of memory."""
    exits = [make_exit(1, error=make_error(type="RuntimeError", message=message))]
    slots = {1: make_slot(1)}
    verdict = diagnose_host_oom(exits, slots, KILLED, best_position=(1, 7))
    assert verdict is not None
    assert verdict.cause is Cause.host_oom
    assert verdict.sentence.startswith(
        "The kernel killed a process that rank 1 had started, which then raised RuntimeError, because memory"
        " was full."
    )
    assert diagnose_host_oom(exits, slots, KernelKills(), best_position=(1, 7)) is None


def test_an_exception_of_another_kind_stays_what_it_is() -> None:
    """A division by zero in the minute after a reward worker was killed is a division by zero."""
    assert (
        diagnose_host_oom([make_exit(1, error=make_error())], {1: make_slot(1)}, KILLED, best_position=(1, 7))
        is None
    )
