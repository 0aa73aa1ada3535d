"""Idle threads of libraries."""

from __future__ import annotations

import threading
import time

from tqdm._monitor import TMonitor

from grpo_run.runtime.rank.heartbeat import idle_threads


class _Bars:
    """A class of progress bars whose lock can be held."""

    _lock = threading.Lock()
    _instances: frozenset[object] = frozenset()

    @classmethod
    def get_lock(cls) -> threading.Lock:
        return cls._lock


def _eventually(expected: bool, native_id: int) -> bool:
    deadline = time.monotonic() + 10
    while (native_id in idle_threads()) is not expected:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def test_tqdms_monitor_is_idle_only_while_it_waits_for_its_next_round() -> None:
    """Not while it draws, or waits for the lock of the bars."""
    monitor = TMonitor(_Bars, 0.05)
    try:
        assert monitor.native_id is not None
        assert _eventually(True, monitor.native_id)
        with _Bars._lock:
            assert _eventually(False, monitor.native_id)
            assert monitor.native_id not in idle_threads()
        assert _eventually(True, monitor.native_id)
    finally:
        monitor.exit()


def test_other_threads_are_not_idle() -> None:
    """A thread of the user's that waits in the same way."""
    event = threading.Event()
    thread = threading.Thread(target=event.wait, daemon=True)
    thread.start()
    assert thread.native_id not in idle_threads()
    event.set()
    thread.join(10)
