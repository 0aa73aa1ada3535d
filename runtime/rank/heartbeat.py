"""The heartbeat of a rank's interpreter, and the Python threads that are idle and wake no other.

Started by `session.py` in a thread that needs nothing but the interpreter. A missing heartbeat tells the
watchdog that the interpreter is stuck, for example because native code holds its lock. Once per second the
thread publishes which threads of libraries are idle, itself included, for the proof that nothing can wake a
rank: such a thread waits with a time limit, so the kernel alone cannot tell it from one that is about to
act. Takes no lock, because any thread may hold one forever. Does not judge.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.upstream import process_names

IDLE_WHILE_WAITING_FOR = {
    ("tqdm._monitor", "TMonitor"): "was_killed"  # redraws progress bars every 10 s; wakes nobody
}
"""Module and class of a thread, and the attribute with the event for which only this thread waits.

A closed list: each thread is here because nothing waits for what it does after its wait has ended.
"""


def idle_threads() -> list[int]:
    """Return the native ids of the listed threads that wait for their event. Takes about 1 µs per thread."""
    return [
        thread.native_id
        for thread in process_names.running_threads()
        if thread.native_id is not None
        and (event := IDLE_WHILE_WAITING_FOR.get((type(thread).__module__, type(thread).__name__)))
        and process_names.has_waiter(getattr(thread, event, None))
    ]


def start_heartbeat(
    slot: SlotWriter, interval_seconds: float, *, also: Callable[[], None] = lambda: None
) -> threading.Thread:
    """Write a heartbeat to the slot every `interval_seconds`, from a daemon thread, and call `also`."""
    pause = threading.Event()

    def run() -> None:
        own = threading.get_native_id()
        while True:
            slot.publish_threads(own, idle_threads())
            slot.heartbeat()
            also()
            pause.wait(interval_seconds)

    thread = threading.Thread(target=run, daemon=True, name="grpo-run-heartbeat")
    thread.start()
    return thread
