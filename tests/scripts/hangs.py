"""A plain TRL GRPO script that hangs once, at the place `--where` and in the way `--how`.

The mistake is in the user's own code, on one rank or all, and it happens once: just before, the rank creates
`fault-RANK.json` exclusively in the working directory, with the time, so that a restarted script trains
normally. It then ends with the weights of an undisturbed run of the same arguments. The line that does not
return has the comment `FAULT: <how>`, by which tests find its number. The script does not know what launches
it.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import itertools
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import places


def _sleep() -> None:
    time.sleep(100_000)  # FAULT: sleep


def _lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # FAULT: lock


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)  # FAULT: stop


def _regex() -> None:
    re.match(r"(a+)+$", "a" * 100 + "b")  # FAULT: regex


def _busy() -> None:
    any(number < 0 for number in itertools.count())  # FAULT: busy


def _queue() -> None:
    queue.Queue[int]().get()  # FAULT: queue


def _child() -> None:
    subprocess.run(["sleep", "100000"], check=True)  # FAULT: child


def _join() -> None:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    thread.join()  # FAULT: join


def _crossed() -> None:
    first, second, both_held = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def other() -> None:
        with second:
            both_held.wait()
            first.acquire()

    threading.Thread(target=other, daemon=True).start()
    with first:
        both_held.wait()
        second.acquire()  # FAULT: crossed


def _future() -> None:
    Future[int]().result()  # FAULT: future


def _pool() -> None:
    ThreadPoolExecutor(1).submit(threading.Event().wait).result()  # FAULT: pool


def _asyncio() -> None:
    asyncio.run(asyncio.Event().wait())  # FAULT: asyncio


def _pipe() -> None:
    reading, _writing = os.pipe()
    os.read(reading, 1)  # FAULT: pipe


def _forked_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    if not (pid := os.fork()):
        lock.acquire()
    os.waitpid(pid, 0)  # FAULT: forked-lock


def _full_pipe() -> None:
    subprocess.Popen(["yes"], stdout=subprocess.PIPE).wait()  # FAULT: full-pipe


def _flock() -> None:
    for _ in range(2):
        fcntl.flock(os.open("locked", os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)  # FAULT: flock


def _stopped_child() -> None:
    subprocess.run(["sh", "-c", "kill -STOP $$"], check=True)  # FAULT: stopped-child


def _poll() -> None:
    any(time.sleep(0.2) for _ in itertools.count())  # type: ignore[func-returns-value] # FAULT: poll


HANGS: dict[str, Callable[[], None]] = {
    "sleep": _sleep,
    "lock": _lock,
    "stop": _stop,
    "regex": _regex,
    "busy": _busy,
    "queue": _queue,
    "child": _child,
    "join": _join,
    "crossed": _crossed,
    "future": _future,
    "pool": _pool,
    "asyncio": _asyncio,
    "pipe": _pipe,
    "forked-lock": _forked_lock,
    "full-pipe": _full_pipe,
    "flock": _flock,
    "poll": _poll,
    "stopped-child": _stopped_child,
}


class Fault:
    """The hang: where, how, and on which rank."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.where, self.how, self.step = arguments.where, arguments.how, arguments.fault_step
        self._marker = Path(f"fault-{os.environ.get('RANK', '0')}.json")
        self._here = arguments.fault_rank in (None, int(os.environ.get("RANK", "0")))

    def visit(self, place: str, step: int) -> None:
        """Hang if this is the place, the first time that any attempt is here."""
        if place != self.where or not self._here or (place in places.IN_EVERY_STEP and step != self.step):
            return
        try:
            descriptor = os.open(self._marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except FileExistsError:
            return
        with open(descriptor, "w") as file:
            json.dump({"time": time.time(), "pid": os.getpid(), "step": step}, file)
        HANGS[self.how]()


def main() -> None:
    parser = places.argument_parser(__doc__)
    parser.add_argument("--where", choices=places.PLACES, default=None)
    parser.add_argument("--how", choices=tuple(HANGS), default="sleep")
    parser.add_argument("--fault-rank", type=int, default=None, help="all by default")
    parser.add_argument("--fault-step", type=int, default=12)
    arguments = parser.parse_args()
    places.run(arguments, Fault(arguments).visit)


if __name__ == "__main__":
    main()
