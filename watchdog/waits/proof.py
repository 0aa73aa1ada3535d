"""Proof that nothing alive can wake a rank, or that nothing in it happens before a known time.

The threads of a rank and of its descendants are stuck together if each of them waits for something that only
threads of this set can do. Every thread that is not shown to wait for such a thing is active: it runs, it was
scheduled between the two looks, it waits with a time limit or for something outside, or it could not be read.
Whoever an active thread may wake is active too; what remains is stuck. Because no thread of the remaining set
ran between two looks, all of them waited at the same moment.

Idle threads of libraries that wake nobody by themselves are a closed list (`IDLE_THREADS`): by the name that
the library gives to its thread and by the wait in which it is idle, as measured with torch 2.13 on a CPU. A
thread on the list that is in any other wait is at work. Idle threads that wait in a futex without a time
limit (Gloo's run loops, OpenMP, the tokenizers' pool) need no entry.

Called by `runtime.supervisor.detection`. Pure. Does not know why a thread waits.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from grpo_run.watchdog.waits.looks import Process, RankLook, Wait, WaitingThread, WaitKind


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleThread:
    """An idle thread: its name, and its wait. `longest_seconds` limits the time limit of that wait."""

    name: str
    kind: WaitKind
    calls: tuple[str, ...]
    longest_seconds: float = 0.0


IDLE_THREADS = (
    # Gloo's network thread. It wakes the waiters of a collective or of a receive: the collective log shows
    # the waiter, and a run loop with a pending collective has a time limit
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


ERROR_SIGNALS = frozenset(
    {
        signal.SIGILL, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV,  # faulthandler's
        32, 33,  # used by the C library
    }
)  # fmt: skip
"""Signals whose handlers run no code of the script."""
SIGNALS_OF_OTHERS = frozenset(
    {
        signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGPIPE, signal.SIGTERM, signal.SIGXFSZ,
        signal.SIGCHLD,
    }
)  # fmt: skip
"""Signals that a process does not cause itself while all its threads wait; other processes of the rank may.

Any other handled signal (SIGALRM of `signal.alarm`, SIGUSR1) may come at any time.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StuckRank:
    """A rank that nothing alive can wake.

    `wait` is what its main thread waits for. `until_seconds` is the monotonic time before which nothing
    happens in it; infinite if nothing ever will. `by_stop` says that this depends on a process that a signal
    has stopped.
    """

    wait: Wait
    until_seconds: float
    by_stop: bool


def prove_stuck(before: RankLook, now: RankLook) -> StuckRank | None:
    """Return in what way the rank is stuck, or None if the two looks do not prove it.

    Args:
        before, now: two looks, at least a second apart. The same one twice tells whether another is worth its
            time.
    """
    main = now.main_thread
    if main is None:
        return None
    for with_sleepers in (False, True):
        stuck, active = _stuck_threads(before, now, with_sleepers=with_sleepers)
        if main.tid not in stuck:
            continue
        # nobody wakes a sleeping thread, but anything that runs beside it may be progress
        if with_sleepers and _at_work(now, active):
            continue
        waits = [thread.wait for thread in stuck.values()]
        return StuckRank(
            wait=main.wait,
            until_seconds=min(wait.until_seconds for wait in waits) if with_sleepers else math.inf,
            by_stop=any(wait.kind is WaitKind.stopped for wait in waits),
        )
    return None


def _stuck_threads(
    before: RankLook, now: RankLook, *, with_sleepers: bool
) -> tuple[dict[int, WaitingThread], set[int]]:
    """Return the largest set of threads that only they themselves could wake, by id, and the processes in
    which anything may run.

    Args:
        with_sleepers: count threads that sleep until a known time as stuck.
    """
    stuck: dict[int, WaitingThread] = {}
    process_of: dict[int, Process] = {}
    active: set[int] = set()
    idle: set[int] = set()  # processes that only wait for work; they may still do it
    earlier = {
        thread.tid: thread for process in before.processes.values() for thread in process.threads or ()
    }
    idle_threads = before.idle_threads & now.idle_threads
    for process in now.processes.values():
        if process.threads is None or process.has_timers or _handles_other_signals(process):
            active.add(process.pid)
        for thread in process.threads or ():
            if thread.wait.kind is WaitKind.ended:
                continue
            main = thread.tid == now.pid
            if not main and (is_idle(thread) or (process.pid == now.pid and thread.tid in idle_threads)):
                if process.pid != now.pid:
                    idle.add(process.pid)
            elif _is_candidate(thread, with_sleepers=with_sleepers) and earlier.get(thread.tid) == thread:
                stuck[thread.tid], process_of[thread.tid] = thread, process
            else:
                active.add(process.pid)
    while True:
        woken = [
            tid for tid, thread in stuck.items() if _can_be_woken(thread, process_of[tid], now, active, idle)
        ]
        if not woken:
            return stuck, active
        for tid in woken:
            del stuck[tid]
            active.add(process_of[tid].pid)


def _at_work(look: RankLook, active: AbstractSet[int]) -> bool:
    """Whether a process other than a helper is active."""
    return any(not look.processes[pid].helper for pid in active)


def _handles_other_signals(process: Process) -> bool:
    return bool(process.caught_signals - ERROR_SIGNALS - SIGNALS_OF_OTHERS)


def _is_candidate(thread: WaitingThread, *, with_sleepers: bool) -> bool:
    kind = thread.wait.kind
    if kind is WaitKind.stopped:
        return True
    waits = kind in (WaitKind.futex, WaitKind.child) or (with_sleepers and kind is WaitKind.sleep)
    return waits and thread.state == "S"


def _can_be_woken(
    thread: WaitingThread, process: Process, look: RankLook, active: set[int], idle: set[int]
) -> bool:
    """Whether an active process may wake the thread."""
    if process.pid in active:
        return True
    if process.caught_signals & SIGNALS_OF_OTHERS and _at_work(look, active):
        return True  # a child that exits runs a handler in its parent; a helper may interrupt it after a time
    if thread.wait.kind is WaitKind.stopped:
        return bool(active)
    if thread.wait.kind is not WaitKind.child:
        return False
    children = {other.pid for other in look.processes.values() if other.parent == process.pid}
    if thread.wait.child in children:
        children = {thread.wait.child}
    return not children or bool(children & (active | idle))
