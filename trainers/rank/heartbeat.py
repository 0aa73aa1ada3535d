"""The heartbeat of a rank's interpreter, from a thread that needs nothing but the interpreter.

Started by the session. A missing heartbeat tells the watchdog that the interpreter is stuck, for example
because native code holds its lock. The thread also publishes which Python threads are idle and wake no other
thread (`idle_threads.py`), itself included.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.trainers.rank.idle_threads import idle_threads


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
