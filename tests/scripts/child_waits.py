"""Legitimate waits for children: subprocesses, forks, pools, and what they hold.

The second part of `waits.py`, which describes them.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from waits import FOREVER, WokenUp, handling, legitimate, wake_up

FORK = multiprocessing.get_context("fork")


@legitimate
def _child_output(seconds: float) -> None:
    subprocess.check_output(["sh", "-c", f"sleep {seconds}; echo done"])


@legitimate
def _raw_fork(seconds: float) -> None:
    if not (pid := os.fork()):
        time.sleep(seconds)
        sys.exit(0)  # as the user wrote it, not os._exit
    os.waitpid(pid, 0)


@legitimate
def _asyncio_child(seconds: float) -> None:
    async def run() -> None:
        child = await asyncio.create_subprocess_exec("sleep", str(seconds))
        await child.wait()

    asyncio.run(run())


@legitimate
def _sandbox(seconds: float) -> None:
    for part in (0.5, 0.3, 0.2):  # killed and retried twice, then given up
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(["sleep", str(FOREVER)], timeout=seconds * part, check=True)


@legitimate
def _process_pool(seconds: float) -> None:
    with FORK.Pool(2) as pool:
        pool.map(time.sleep, [seconds, seconds / 2])


@legitimate
def _process_executor(seconds: float) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, FORK) as pool:
        pool.submit(time.sleep, seconds).result()


@legitimate
def _process_event(seconds: float) -> None:
    event = FORK.Event()

    def child() -> None:
        time.sleep(seconds)
        event.set()

    process = FORK.Process(target=child)
    process.start()
    event.wait()
    process.join()


@legitimate
def _process_lock(seconds: float) -> None:
    lock, held = FORK.Lock(), FORK.Event()

    def child() -> None:
        with lock:
            held.set()
            time.sleep(seconds)

    process = FORK.Process(target=child)
    process.start()
    held.wait()
    lock.acquire()
    process.join()


@legitimate
def _process_connection(seconds: float) -> None:
    ours, theirs = FORK.Pipe()

    def child(connection: Any) -> None:
        time.sleep(seconds)
        connection.send(1)

    process = FORK.Process(target=child, args=(theirs,))
    process.start()
    ours.recv()
    process.join()


@legitimate
def _child_signal_in_lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    with handling(signal.SIGCHLD, wake_up):
        child = None
        with contextlib.suppress(WokenUp):
            child = subprocess.Popen(["sleep", str(seconds)])
            lock.acquire()
    if child is not None:
        child.wait()


@legitimate
def _interrupt_of_child(seconds: float) -> None:
    done = threading.Event()
    with handling(signal.SIGINT, lambda *_: done.set()):
        child = subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -INT {os.getpid()}"])
        done.wait()
    child.wait()


@legitimate
def _spawned_pool(seconds: float) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.map(time.sleep, [seconds, seconds / 2])


@legitimate
def _queue_of_process(seconds: float) -> None:
    items = FORK.Queue()
    process = FORK.Process(target=lambda: (time.sleep(seconds), items.put(1)))
    process.start()
    items.get()
    process.join()


@legitimate
def _terminal_of_child(seconds: float) -> None:
    controlling, terminal = os.openpty()
    child = subprocess.Popen(
        ["sh", "-c", f"sleep {seconds}; echo done"], stdout=terminal, start_new_session=True
    )
    os.close(terminal)
    assert os.read(controlling, 10)
    child.wait()
    os.close(controlling)


@legitimate
def _child_signal_in_sleep(seconds: float) -> None:
    child = None
    with handling(signal.SIGCHLD, wake_up), contextlib.suppress(WokenUp):
        child = subprocess.Popen(["sleep", str(seconds)])
        time.sleep(FOREVER)
    assert child is not None
    child.wait()


@legitimate
def _child_left_running(seconds: float) -> None:
    subprocess.Popen(["sleep", str(seconds)])


@legitimate
def _slow_reader_of_child(seconds: float) -> None:
    """The child has filled a pipe and waits for a thread of ours, which waits before it reads on."""
    child = subprocess.Popen(["sh", "-c", "head -c 200000 /dev/zero"], stdout=subprocess.PIPE)
    assert child.stdout is not None

    def read() -> None:
        time.sleep(seconds)
        child.stdout.read()

    threading.Thread(target=read).start()
    child.wait()


@legitimate
def _sandbox_of_namespaces(seconds: float) -> None:
    """A child in a process namespace of its own, where that is permitted."""
    command = ["sleep", str(seconds)]
    if subprocess.run(["unshare", "-pf", "true"], check=False, stderr=subprocess.DEVNULL).returncode == 0:
        command = ["unshare", "-pf", *command]
    subprocess.run(command, check=True)


@legitimate
def _conversation_with_child(seconds: float) -> None:
    """Each reads what the other has not written yet; a timer's thread writes."""
    child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    threading.Timer(seconds, os.write, (child.stdin.fileno(), b"x\n")).start()
    assert child.stdout.readline()
    child.communicate()


@legitimate
def _output_of_grandchild(seconds: float) -> None:
    """The child has ended; its pipe is held by a process that is nobody's child any more."""
    subprocess.check_output(["sh", "-c", f"setsid sleep {seconds} &"])


@legitimate
def _fork_server_that_imports(seconds: float) -> None:
    """The server imports modules before it takes the descriptors sent to it, which nobody holds until
    then.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "slow_to_import.py").write_text(f"import time; time.sleep({seconds})")
        sys.path.insert(0, folder)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["slow_to_import"])
        process = context.Process(target=time.sleep, args=(0,))
        process.start()  # waits for the process id, in a pipe
        process.join()
        sys.path.remove(folder)
