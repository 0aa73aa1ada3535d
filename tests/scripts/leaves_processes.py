"""A script that starts processes in every way that outlives a rank, in its first `--attempts` attempts.

    child      in the rank's session         session    in a session of its own, with an empty environment
    daemon     forked twice, no new program  server     forked twice, holds a TCP port, and ignores SIGTERM
    workers    forked with the rank's own handler of SIGTERM, and a shared memory segment

Their pids are appended to `started`. Rank 0 then writes `ready` and, in these attempts, waits to be killed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--attempts", type=int, default=1)
parser.add_argument("--kinds", default="child,session,daemon,server,workers")
options = parser.parse_args()


def note(pid: int) -> None:
    """Append a pid to the file."""
    with open("started", "a") as file:
        file.write(f"{pid}\n")


def daemonize(serve: bool) -> None:
    """Fork twice; return when the daemon is ready."""
    reading, writing = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.setsid()
        if os.fork() == 0:
            if serve:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                listening = socket.socket()
                listening.bind(("127.0.0.1", options.port))
                listening.listen()
            note(os.getpid())
            os.write(writing, b"1")
            time.sleep(600)
        os._exit(0)
    os.waitpid(middle, 0)
    assert os.read(reading, 1)


def start(kind: str) -> None:
    """Start processes of one kind."""
    if kind == "child":
        note(subprocess.Popen(["sleep", "600"]).pid)
    elif kind == "session":
        note(subprocess.Popen(["sleep", "600"], start_new_session=True, env={}).pid)
    elif kind == "workers":
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        global memory
        memory = shared_memory.SharedMemory(create=True, size=1 << 20)
        with open("memory", "a") as names:
            names.write(f"{memory.name}\n")
        for _ in range(2):
            worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
            worker.start()
            note(worker.pid or 0)
    else:
        daemonize(kind == "server")


if os.environ["RANK"] == "0":
    before = len(Path("attempts").read_text()) if Path("attempts").exists() else 0
    if before < options.attempts:
        with open("attempts", "a") as file:
            file.write("x")
        for kind in options.kinds.split(","):
            start(kind)
        Path("ready").touch()
        time.sleep(600)
    elif options.port:
        with socket.socket() as listening:  # in use if the server was left
            listening.bind(("127.0.0.1", options.port))
    sys.stdout.write("done\n")
