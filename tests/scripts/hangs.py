"""A plain TRL GRPO script that hangs once, at the place `--where` and in the way `--how`.

The mistake is in the user's own code, on one rank or all, and it happens once: just before, the rank creates
`fault-RANK.json` exclusively in the working directory, with the time, so that a restarted script trains
normally. It then ends with the weights of an undisturbed run of the same arguments. The line that does not
return has the comment `FAULT: <how>`, by which tests find its number. The script does not know what launches
it.
"""

from __future__ import annotations

import argparse
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


HANGS: dict[str, Callable[[], None]] = {
    "sleep": _sleep, "lock": _lock, "stop": _stop, "regex": _regex, "busy": _busy, "queue": _queue,
    "child": _child, "join": _join,
}  # fmt: skip


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
