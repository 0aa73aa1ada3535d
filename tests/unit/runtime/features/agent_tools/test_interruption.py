"""A call in the main thread is interrupted when it is overdue, and only then."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.features.agent_tools._interruption import INTERRUPT, Interrupter
from grpo_run.runtime.features.agent_tools._outages import CallEndedError


@contextmanager
def beating(interrupter: Interrupter) -> Iterator[None]:
    """Let a thread beat as the heartbeat does, only faster."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.01):
            interrupter.beat()

    thread = threading.Thread(target=run)
    with interrupter.armed() as armed:
        assert armed
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def sleeps() -> None:
    time.sleep(30)


def loops() -> None:
    while True:
        pass


def waits_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=30)


def retries() -> None:
    for _ in range(3):
        try:
            time.sleep(30)
        except Exception:  # noqa: BLE001 - a tool that repeats whatever fails
            pytest.fail("the interruption is no failure that a tool repeats")


def raises_its_own() -> None:
    try:
        time.sleep(30)
    finally:
        raise KeyError("own")


@pytest.mark.parametrize("call", [sleeps, loops, waits_for_a_lock, retries, raises_its_own])
def test_an_overdue_call_ends_with_its_line(call: Callable[[], None]) -> None:
    """Whatever it waits for, and whatever it makes of the end."""
    interrupter = Interrupter()
    began = time.monotonic()
    with beating(interrupter), pytest.raises(CallEndedError, match="no answer within") as ended:
        interrupter.run(0.05, call)
    assert time.monotonic() - began < 10
    assert ended.value.where.startswith(f"{Path(__file__).name}:")


def test_a_call_that_returns_is_left_alone() -> None:
    """Also one that raises, one without a limit, and one in which another call has been."""
    interrupter = Interrupter()

    def inner() -> Any:
        with pytest.raises(CallEndedError):
            interrupter.run(0.05, sleeps)
        return threading.get_ident()

    def fails() -> None:
        raise KeyError("own")

    with beating(interrupter):
        assert interrupter.run(60.0, inner) == threading.get_ident()
        assert interrupter.run(float("inf"), lambda: time.sleep(0.1) or 3) == 3
        with pytest.raises(KeyError):
            interrupter.run(60.0, fails)
        signal.pthread_kill(threading.get_ident(), INTERRUPT)  # of a call that has returned meanwhile
    assert signal.getsignal(INTERRUPT) is signal.SIG_DFL


def test_a_script_that_uses_the_signal_keeps_it() -> None:
    """Nothing is interrupted then."""
    signal.signal(INTERRUPT, signal.SIG_IGN)
    try:
        interrupter = Interrupter()
        with interrupter.armed() as armed:
            assert not armed
            assert interrupter.run(0.0, lambda: 3) == 3
            assert signal.getsignal(INTERRUPT) is signal.SIG_IGN
    finally:
        signal.signal(INTERRUPT, signal.SIG_DFL)


def test_a_call_in_another_thread_is_not_interrupted() -> None:
    """The signal is handled in the main thread."""
    interrupter, found = Interrupter(), []
    with beating(interrupter):
        thread = threading.Thread(target=lambda: found.append(interrupter.run(0.01, lambda: time.sleep(0.1))))
        thread.start()
        thread.join()
    assert found == [None]
