"""Legitimate waits that a user's code may contain: each takes the seconds after which it returns.

Used by `oddities.py` beside it. Something alive ends every wait: here the process itself, its threads and
timers; in `child_waits.py` its children; in `outside_waits.py` processes outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

FOREVER = 100_000


Wait = Callable[[float], None]
WAITS: dict[str, Wait] = {}


def legitimate(function: Wait) -> Wait:
    """Register a wait by its name."""
    WAITS[function.__name__.strip("_").replace("_", "-")] = function
    return function


class WokenUp(Exception):
    """Raised by a signal handler out of a wait without an end of its own."""


@legitimate
def _sleep(seconds: float) -> None:
    time.sleep(seconds)


@legitimate
def _compute(seconds: float) -> None:
    end = time.monotonic() + seconds
    all(time.monotonic() < end for _ in itertools.count())


@legitimate
def _child(seconds: float) -> None:
    subprocess.run(["sleep", str(seconds)], check=True)


@legitimate
def _lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(seconds, lock.release).start()
    lock.acquire()


@legitimate
def _lock_behind_native_sleep(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()

    def release() -> None:
        ctypes.CDLL(None).usleep(int(seconds * 1e6))
        lock.release()

    threading.Thread(target=release).start()
    lock.acquire()


@legitimate
def _queue(seconds: float) -> None:
    fed: queue.Queue[int] = queue.Queue()
    threading.Timer(seconds, fed.put, (1,)).start()
    fed.get()


@legitimate
def _chain_of_threads(seconds: float) -> None:
    first, second = threading.Event(), threading.Event()
    threading.Thread(target=lambda: (first.wait(), second.set())).start()
    threading.Thread(target=lambda: (_child(seconds), first.set())).start()
    second.wait()


@legitimate
def _event_after_compute(seconds: float) -> None:
    done = threading.Event()
    threading.Thread(target=lambda: (_compute(seconds), done.set())).start()
    done.wait()


@legitimate
def _join(seconds: float) -> None:
    thread = threading.Thread(target=time.sleep, args=(seconds,))
    thread.start()
    thread.join()


@legitimate
def _condition(seconds: float) -> None:
    condition, end = threading.Condition(), time.monotonic() + seconds
    with condition:
        while time.monotonic() < end:
            condition.wait(0.5)


@legitimate
def _asyncio(seconds: float) -> None:
    asyncio.run(asyncio.sleep(seconds))


@legitimate
def _asyncio_to_thread(seconds: float) -> None:
    asyncio.run(asyncio.to_thread(time.sleep, seconds))


@contextlib.contextmanager
def handling(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def wake_up(*_: Any) -> None:
    raise WokenUp


def _alarmed(wait: Callable[[], object], seconds: float) -> None:
    """Leave a wait by an alarm, as reward functions limit the time of a parser."""
    with handling(signal.SIGALRM, wake_up):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with contextlib.suppress(WokenUp):
            wait()


@legitimate
def _alarm_in_lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    _alarmed(lock.acquire, seconds)


@legitimate
def _alarm_in_queue(seconds: float) -> None:
    _alarmed(queue.Queue[int]().get, seconds)


@legitimate
def _alarm_in_sleep(seconds: float) -> None:
    _alarmed(lambda: time.sleep(FOREVER), seconds)


@legitimate
def _alarm_in_pause(seconds: float) -> None:
    _alarmed(signal.pause, seconds)


@legitimate
def _alarm_in_regex(seconds: float) -> None:
    _alarmed(lambda: re.match(r"(a+)+$", "a" * 100 + "b"), seconds)


@legitimate
def _timer_in_pause(seconds: float) -> None:
    with handling(signal.SIGUSR1, lambda *_: None):
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGUSR1)).start()
        signal.pause()


@legitimate
def _signal_wait(seconds: float) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Timer(seconds, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1)).start()
    signal.sigwait({signal.SIGUSR1})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})


@legitimate
def _event_descriptor(seconds: float) -> None:
    descriptor = ctypes.CDLL(None).eventfd(0, 0)
    threading.Timer(seconds, os.write, (descriptor, (1).to_bytes(8, sys.byteorder))).start()
    os.read(descriptor, 8)
    os.close(descriptor)


class _TimerSpecification(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("every_s", "every_ns", "first_s", "first_ns")]


@legitimate
def _timer_descriptor(seconds: float) -> None:
    library = ctypes.CDLL(None)
    descriptor = library.timerfd_create(time.CLOCK_MONOTONIC, 0)
    when = _TimerSpecification(0, 0, int(seconds), int(seconds % 1 * 1e9))
    assert library.timerfd_settime(descriptor, 0, ctypes.byref(when), None) == 0
    os.read(descriptor, 8)
    os.close(descriptor)


@legitimate
def _posix_timer(seconds: float) -> None:
    library = ctypes.CDLL(None)
    timer = ctypes.c_void_p()
    with handling(signal.SIGALRM, lambda *_: None):
        assert library.timer_create(time.CLOCK_MONOTONIC, None, ctypes.byref(timer)) == 0
        when = _TimerSpecification(0, 0, int(seconds), int(seconds % 1 * 1e9))
        assert library.timer_settime(timer, 0, ctypes.byref(when), None) == 0
        signal.pause()
        library.timer_delete(timer)


@legitimate
def _hold_interpreter(seconds: float) -> None:
    count = 5_000_000
    began = time.monotonic()
    sum(itertools.repeat(1, count))
    per_second = count / (time.monotonic() - began)
    sum(itertools.repeat(1, int(per_second * seconds)))


@legitimate
def _socket_in_flight(seconds: float) -> None:
    """The only other end of a socket pair lies unread in another one, until a timer's thread takes it."""
    ours, theirs = socket.socketpair()
    sender, receiver = socket.socketpair()
    socket.send_fds(sender, [b"x"], [theirs.fileno()])
    theirs.close()

    def take() -> None:
        descriptor = socket.recv_fds(receiver, 1, 1)[1][0]
        os.write(descriptor, b"x")
        os.close(descriptor)

    threading.Timer(seconds, take).start()
    assert ours.recv(1)
    for each in (ours, sender, receiver):
        each.close()


@legitimate
def _receive_timeout_of_kernel(seconds: float) -> None:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, int(seconds).to_bytes(8, sys.byteorder) + bytes(8))
    with contextlib.suppress(BlockingIOError):
        ours.recv(1)
    for each in (ours, theirs):
        each.close()


@legitimate
def _threads_left_waiting(seconds: float) -> None:
    """Threads of a library that wait for ever, beside a child that ends."""
    lock = threading.Lock()
    lock.acquire()
    for wait in (lock.acquire, queue.Queue[int]().get, threading.Event().wait):
        threading.Thread(target=wait, daemon=True).start()
    _child(seconds)


@legitimate
def _recompilation(seconds: float) -> None:
    """Compile a function for two shapes; takes as long as the compiler takes."""
    import torch

    compiled = torch.compile(lambda value: (value * 2 + 1).relu().sum(), dynamic=False)
    for size in (3, 5):
        compiled(torch.ones(size))


@legitimate
def _alarm_releases_lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    with handling(signal.SIGALRM, lambda *_: lock.release()):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        lock.acquire()


@legitimate
def _worker_thread_of_library(seconds: float) -> None:
    """The work is done in a thread that lives longer than the wait, as in an executor of a library."""
    tasks: queue.Queue[Callable[[], None]] = queue.Queue()
    done = threading.Event()

    def work() -> None:
        while True:
            tasks.get()()

    threading.Thread(target=work, daemon=True).start()
    tasks.put(lambda: _child(seconds))
    tasks.put(done.set)
    done.wait()
