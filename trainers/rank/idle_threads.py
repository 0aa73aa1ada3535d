"""Idle Python threads of libraries that will not wake another thread when they run again.

Called by the heartbeat once per second, for the proof that nothing can wake a rank: such a thread waits with a
time limit, so the kernel alone cannot tell it from one that is about to act. Takes no lock, because any thread
may hold one forever. Does not judge.
"""

from __future__ import annotations

from grpo_run.trainers.upstream import python_threads

IDLE_WHILE_WAITING_FOR = {
    ("tqdm._monitor", "TMonitor"): "was_killed",  # redraws progress bars every 10 s; wakes nobody
}
"""Module and class of a thread, and the attribute with the event for which only this thread waits.

A closed list: each thread is here because nothing waits for what it does after its wait has ended.
"""


def idle_threads() -> list[int]:
    """Return the native ids of the listed threads that wait for their event. Takes about 1 µs per thread."""
    return [
        thread.native_id
        for thread in python_threads.running_threads()
        if thread.native_id is not None
        and (event := IDLE_WHILE_WAITING_FOR.get((type(thread).__module__, type(thread).__name__)))
        and python_threads.has_waiter(getattr(thread, event, None))
    ]
