"""A plain TRL GRPO script of an agent whose tool or environment is slow and healthy, in one of many ways.

Each first completion calls `search`, a tool, and `add`, a method of the environment, as `agent.py` has it.
The second call on each rank takes `SLOW_SECONDS` by `--kind`; with `--first` the first one does. The answers
are those of a quick tool, so the weights are, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import queue
import select
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import agent
import numpy
import tiny
import tool_faults

SLOW_SECONDS = 4.0
calls = itertools.count(1)
kind, slow_call = "quick", 2


def sleep() -> None:
    time.sleep(SLOW_SECONDS)


def child() -> None:
    subprocess.run(["sleep", str(SLOW_SECONDS)], check=True)


def python_child() -> None:
    subprocess.run([sys.executable, "-c", f"import time; time.sleep({SLOW_SECONDS})"], check=True)


def threads() -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(time.sleep, [SLOW_SECONDS] * 4))


def backoff() -> None:
    for pause in (0.5, 1.0, 2.5, 0.0):
        try:
            if pause:
                raise ConnectionError("busy")
        except ConnectionError:
            time.sleep(pause)


def file_lock() -> None:
    with tempfile.NamedTemporaryFile() as file:
        holder = subprocess.Popen(["flock", file.name, "sleep", str(SLOW_SECONDS)])
        time.sleep(0.3)
        fcntl.flock(file, fcntl.LOCK_EX)
        holder.wait()


def http_server() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(SLOW_SECONDS)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"answer")

        def log_message(self, *given: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.handle_request, daemon=True).start()
    with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/") as answer:
        assert answer.read() == b"answer"
    server.server_close()


def big_output() -> None:
    command = f"head -c 50000000 /dev/zero; sleep {SLOW_SECONDS}"
    assert len(subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout) == 50_000_000


def cpu() -> None:
    end = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < end:
        pass


def matrices() -> None:
    end, matrix = time.monotonic() + SLOW_SECONDS, numpy.eye(300)
    while time.monotonic() < end:
        matrix = matrix @ matrix


def event_loop() -> None:
    asyncio.run(asyncio.sleep(SLOW_SECONDS))


def waiting_queue() -> None:
    waiting: queue.Queue[int] = queue.Queue()
    threading.Timer(SLOW_SECONDS, waiting.put, [1]).start()
    waiting.get(timeout=60)


def event() -> None:
    over = threading.Event()
    threading.Timer(SLOW_SECONDS, over.set).start()
    assert over.wait(60)


def approval() -> None:
    """Poll for a file that somebody else makes."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "approved")
        maker = subprocess.Popen(["sh", "-c", f"sleep {SLOW_SECONDS}; touch {answer}"])
        while not answer.exists():
            time.sleep(0.2)
        maker.wait()


def database() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first = sqlite3.connect(f"{folder}/data", check_same_thread=False, isolation_level=None)
        first.execute("create table words (word text)")
        first.execute("begin exclusive")
        threading.Timer(SLOW_SECONDS, first.execute, ["commit"]).start()
        with contextlib.closing(sqlite3.connect(f"{folder}/data", timeout=60)) as second:
            second.execute("insert into words values ('a')")
            second.commit()
        first.close()


def sockets() -> None:
    one, other = socket.socketpair()
    with one, other:
        threading.Timer(SLOW_SECONDS, other.sendall, [b"x"]).start()
        select.select([one], [], [], 60)
        assert one.recv(1) == b"x"


def alarm() -> None:
    """Limit a part of its work by SIGALRM, as many tools do."""

    def ring(number: int, frame: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SLOW_SECONDS)
    with contextlib.suppress(InterruptedError):
        time.sleep(60)
    signal.signal(signal.SIGALRM, before)


def nested() -> None:
    """Another tool inside."""
    for character in "abc":
        search(character)
    time.sleep(SLOW_SECONDS)


async def async_sleep() -> None:
    await asyncio.sleep(SLOW_SECONDS)


async def gather() -> None:
    await asyncio.gather(*(asyncio.sleep(SLOW_SECONDS) for _ in range(8)))


async def async_child() -> None:
    process = await asyncio.create_subprocess_exec("sleep", str(SLOW_SECONDS))
    await process.wait()


async def semaphore() -> None:
    limit = asyncio.Semaphore(2)

    async def one() -> None:
        async with limit:
            await asyncio.sleep(SLOW_SECONDS / 2)

    await asyncio.gather(*(one() for _ in range(4)))


async def in_thread() -> None:
    await asyncio.to_thread(time.sleep, SLOW_SECONDS)


TOOLS: dict[str, Callable[[], Any]] = {
    one.__name__: one
    for one in (
        sleep, child, python_child, threads, backoff, file_lock, http_server, big_output, cpu, matrices,
        event_loop, waiting_queue, event, approval, database, sockets, alarm, nested,
    )
}  # fmt: skip
ASYNCHRONOUS: dict[str, Callable[[], Any]] = {
    one.__name__: one for one in (async_sleep, gather, async_child, semaphore, in_thread)
}
PLACES = ("boot", "reset", "step", "reward")
KINDS = (*TOOLS, *ASYNCHRONOUS, *PLACES)


def due() -> bool:
    return next(calls) == slow_call


def place(name: str) -> None:
    if kind == name and due():
        time.sleep(SLOW_SECONDS)


class Sums(agent.Sums):
    """An environment whose tools add and remember."""

    def __init__(self) -> None:
        place("boot")

    def reset(self, **row: Any) -> None:
        """Begin a rollout."""
        place("reset")
        super().reset(**row)

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: to add.
        """
        place("step")
        return super().add(number)

    def get_reward(self) -> float:
        """Return the sum."""
        place("reward")
        return float(self.total)


def search(word: str) -> Any:
    """Look up a word.

    Args:
        word: to look up.
    """
    if kind in TOOLS and due():
        TOOLS[kind]()
    return word[::-1]


async def search_asynchronously(word: str) -> Any:
    """Look up a word.

    Args:
        word: to look up.
    """
    if due():
        await ASYNCHRONOUS[kind]()
    return word[::-1]


search_asynchronously.__name__ = "search"


def main() -> None:
    global kind, slow_call
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--kind", choices=["quick", *KINDS], default="quick")
    parser.add_argument("--first", action="store_true", help="the first call is the slow one")
    arguments = parser.parse_args()
    kind, slow_call = arguments.kind, 1 if arguments.first else 2
    tool = search_asynchronously if kind in ASYNCHRONOUS else search
    agent.train(arguments, tool_faults.read_a_tool_call, tools=[tool], environment_factory=Sums)


if __name__ == "__main__":
    main()
