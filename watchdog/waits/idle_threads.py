"""Idle threads of libraries that do not wake other threads by themselves.

A closed list, by the name that the library gives to its thread and by the wait in which it is idle, as measured
with torch 2.13 on a CPU. A thread on the list that is in any other wait is at work. Called by `proof.py`. Pure.
Idle threads that wait in a futex without a time limit (Gloo's run loops, OpenMP, the tokenizers' pool) need no
entry, because only a thread of their own process can wake them; an entry lets them run between two looks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_run.watchdog.waits.looks import WaitingThread, WaitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleThread:
    """An idle thread: its name, and its wait. `longest_seconds` limits the time limit of that wait."""

    name: str
    kind: WaitKind
    calls: tuple[str, ...]
    longest_seconds: float = 0.0


IDLE_THREADS = (
    # Gloo's network thread. It wakes the waiters of a collective or of a receive: the collective log shows the
    # waiter, and a run loop with a pending collective has a time limit
    IdleThread(
        name="gloo_tcp_loop", kind=WaitKind.timed, calls=("epoll_wait", "epoll_pwait"), longest_seconds=1.0
    ),
    # torch's worker server and its pool, which only answer the watchdog: its polls make them run
    IdleThread(name="pt_workerserver", kind=WaitKind.accept, calls=("accept", "accept4")),
    IdleThread(name="pt_workerserver", kind=WaitKind.futex, calls=("futex",)),
    # the server of a store that this process hosts; its clients wait on network connections
    IdleThread(name="pt_tcpstore_uv", kind=WaitKind.descriptors, calls=("epoll_wait", "epoll_pwait")),
    # jemalloc's thread (loaded by pyarrow), which returns unused memory to the kernel
    IdleThread(name="jemalloc_bg_thd", kind=WaitKind.timed, calls=("futex",), longest_seconds=math.inf),
    # a worker of a data loader: every 5 s it checks that its parent lives; it works only when it is asked to
    IdleThread(name="pt_data_worker", kind=WaitKind.timed, calls=("poll",), longest_seconds=5.0),
    IdleThread(name="pt_data_worker", kind=WaitKind.accept, calls=("accept", "accept4")),
)


_NAMES = frozenset(idle.name for idle in IDLE_THREADS)


def is_idle(thread: WaitingThread) -> bool:
    """Whether this is a thread of the list in its idle wait."""
    wait = thread.wait
    return thread.name in _NAMES and any(
        thread.name == idle.name
        and wait.kind is idle.kind
        and wait.call in idle.calls
        and (wait.kind is not WaitKind.timed or _is_short(wait.timeout_seconds, idle.longest_seconds))
        for idle in IDLE_THREADS
    )


def _is_short(timeout_seconds: float, longest_seconds: float) -> bool:
    """Whether a time limit is at most as long; one that could not be read (NaN) is not, unless any may be."""
    return longest_seconds == math.inf or timeout_seconds <= longest_seconds
