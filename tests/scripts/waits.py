"""Legitimate waits that a user's code may contain: each takes the seconds after which it returns.

Used by `oddities.py` beside it. Something alive ends every wait: the process itself with its threads and
timers, its children, or a helper that is no descendant of the process. Further kinds are judged by the proof
alone, in `tests/support/waiting_programs`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
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
def _child(seconds: float) -> None:
    subprocess.run(["sleep", str(seconds)], check=True)


@legitimate
def _lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(seconds, lock.release).start()
    lock.acquire()


@legitimate
def _queue(seconds: float) -> None:
    fed: queue.Queue[int] = queue.Queue()
    threading.Timer(seconds, fed.put, (1,)).start()
    fed.get()


@legitimate
def _condition(seconds: float) -> None:
    condition, end = threading.Condition(), time.monotonic() + seconds
    with condition:
        while time.monotonic() < end:
            condition.wait(0.5)


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
def _hold_interpreter(seconds: float) -> None:
    count = 5_000_000
    began = time.monotonic()
    sum(itertools.repeat(1, count))
    per_second = count / (time.monotonic() - began)
    sum(itertools.repeat(1, int(per_second * seconds)))


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
def _raw_fork(seconds: float) -> None:
    if not (pid := os.fork()):
        time.sleep(seconds)
        sys.exit(0)  # as the user wrote it, not os._exit
    os.waitpid(pid, 0)


@legitimate
def _child_left_running(seconds: float) -> None:
    subprocess.Popen(["sleep", str(seconds)])


def _detached(command: str, *, pass_fds: Sequence[int] = ()) -> None:
    """Start a shell command that is no descendant of this process and has a session of its own."""
    twice = ["setsid", "sh", "-c", 'sh -c "$1" >/dev/null 2>&1 &', "sh", command]
    subprocess.run(twice, check=True, pass_fds=pass_fds)


@legitimate
def _pipe_of_helper(seconds: float) -> None:
    reading, writing = os.pipe()
    _detached(f"sleep {seconds}; echo > /proc/self/fd/{writing}", pass_fds=[writing])
    os.close(writing)
    select.select([reading], [], [])
    os.close(reading)


@legitimate
def _fifo_of_helper(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        _detached(f"sleep {seconds}; echo > {folder}/fifo")
        with open(f"{folder}/fifo") as fifo:  # blocks until the helper opens it
            assert fifo.read()


@legitimate
def _file_of_helper(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _detached(f"sleep {seconds}; touch {folder}/ready")
        while not os.path.exists(f"{folder}/ready"):
            time.sleep(0.5)


@legitimate
def _socket_pair_of_helper(seconds: float) -> None:
    ours, theirs = socket.socketpair()
    code = f"import os, time; time.sleep({seconds}); os.write({theirs.fileno()}, b'x')"
    _detached(f'{sys.executable} -S -c "{code}"', pass_fds=[theirs.fileno()])
    theirs.close()
    assert ours.recv(1)
    ours.close()


@legitimate
def _helper_left_running(seconds: float) -> None:
    _detached(f"sleep {seconds}")
