"""Rank 0 forks children that end in every way a process can, then waits for `go` and fails itself.

Each child appends its name to `children`. Those that end like a script fall through to its end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

RANK = os.getpid()


def leave(how: str) -> None:
    """End a child, or return to the script."""
    with open("children", "a") as file:
        file.write(f"{how}\n")
    if how.startswith("exit"):
        sys.exit(int(how[-1]))
    if how == "raise":
        raise ValueError("the child failed")
    if how == "_exit":
        os._exit(0)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)


def fork(how: str, forking: object = os.fork) -> None:
    """Fork a child that ends in this way; the rank waits for it."""
    pid = forking()  # type: ignore[operator]
    pid = pid[0] if isinstance(pid, tuple) else pid
    if pid == 0:
        leave(how)
        raise Fallen
    os.waitpid(pid, 0)


class Fallen(Exception):
    """Takes a child from where it was forked to the end of the script."""


def main() -> None:
    """Fork the children."""
    for how in ("exit 0", "exit 3", "raise", "_exit", "crash", "end"):
        fork(how)
    fork("raise", os.forkpty)
    fork("end", ctypes.CDLL(None).fork)
    fork("exit 3", ctypes.CDLL(None).fork)
    thread = threading.Thread(target=fork, args=("_exit",))
    thread.start()
    thread.join()
    child = multiprocessing.get_context("fork").Process(target=leave, args=("exit 4",))
    child.start()
    child.join()
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            time.sleep(0.2)
            leave("end")
            raise Fallen
        os._exit(0)
    os.waitpid(middle, 0)


def note_handler() -> None:
    """An exit handler, which children inherit."""
    with open("handlers", "a") as file:
        file.write(f"{os.getpid()}\n")


if os.environ["RANK"] == "0":
    atexit.register(note_handler)
    with contextlib.suppress(Fallen):
        main()
    if os.getpid() == RANK:
        while not Path("go").exists():
            time.sleep(0.02)
        raise RuntimeError("the rank failed")
