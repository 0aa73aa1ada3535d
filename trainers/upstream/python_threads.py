"""Private names of Python: of its threads, to tell one that waits for work from one that works, and of its warnings.

Used by `rank` and `saving`.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

THREAD_TARGET = "_target"
"""Attribute of `threading.Thread`: the function that it runs."""
IDLE_WORKER = "work_queue.get(block=True)"
"""Source of the line at which an idle thread of a `ThreadPoolExecutor` waits (`concurrent.futures.thread._worker`).
"""
RUNNING_THREADS = "_active"
"""Attribute of `threading`: the running threads by identifier. `threading.enumerate` takes a lock."""
EVENT_CONDITION = "_cond"
CONDITION_WAITERS = "_waiters"
"""Attributes of an event and of its condition: the locks of the threads that wait."""

FILTERS_CHANGED = "_filters_mutated" if sys.version_info < (3, 14) else "_filters_mutated_lock_held"
"""Function of `warnings` that a change of the filters calls; it makes Python forget which warnings it has shown."""


def running_threads() -> list[threading.Thread]:
    """Return Python's threads without taking a lock; empty if this Python stores them elsewhere."""
    return list(getattr(threading, RUNNING_THREADS, {}).values())


def has_waiter(event: Any) -> bool:
    """Whether a thread waits for a `threading.Event`; False if this Python stores that elsewhere."""
    return bool(getattr(getattr(event, EVENT_CONDITION, None), CONDITION_WAITERS, ()))
