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
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import agent
import tiny
import tool_faults

SLOW_SECONDS = 4.0
calls = itertools.count(1)
kind, slow_call = "quick", 2


def sleep() -> None:
    time.sleep(SLOW_SECONDS)


def child() -> None:
    subprocess.run(["sleep", str(SLOW_SECONDS)], check=True)


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


def cpu() -> None:
    end = time.monotonic() + SLOW_SECONDS
    while time.monotonic() < end:
        pass


def alarm() -> None:
    """Limit a part of its work by SIGALRM, as many tools do."""

    def ring(number: int, frame: Any) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, SLOW_SECONDS)
    with contextlib.suppress(InterruptedError):
        time.sleep(60)
    signal.signal(signal.SIGALRM, before)


TOOLS: dict[str, Callable[[], Any]] = {
    one.__name__: one for one in (sleep, child, file_lock, http_server, cpu, alarm)
}
PLACES = ("boot", "reset", "step", "reward")
KINDS = (*TOOLS, "async_sleep", *PLACES)


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
        await asyncio.sleep(SLOW_SECONDS)
    return word[::-1]


search_asynchronously.__name__ = "search"


def main() -> None:
    global kind, slow_call
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--kind", choices=["quick", *KINDS], default="quick")
    parser.add_argument("--first", action="store_true", help="the first call is the slow one")
    arguments = parser.parse_args()
    kind, slow_call = arguments.kind, 1 if arguments.first else 2
    tool = search_asynchronously if kind == "async_sleep" else search
    agent.train(arguments, tool_faults.read_a_tool_call, tools=[tool], environment_factory=Sums)


if __name__ == "__main__":
    main()
