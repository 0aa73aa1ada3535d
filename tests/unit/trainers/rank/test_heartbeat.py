"""The heartbeat of a rank's interpreter."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from grpo_run.trainers.rank.heartbeat import start_heartbeat


def test_the_heartbeat_repeats_in_a_daemon_thread() -> None:
    """The thread does not keep the process alive."""
    beats = threading.Semaphore(0)
    thread = start_heartbeat(SimpleNamespace(heartbeat=beats.release), 0.001)  # type: ignore[arg-type]
    assert thread.daemon
    assert all(beats.acquire(timeout=10) for _ in range(3))
