"""The keeper of one worker: its parent, which ends it with everything that it has started.

As a subreaper the keeper adopts every process that descends from its worker and loses its parent, also one in a session of
its own. When the rank asks for the end, or the worker exits, the keeper kills its children until it has none, which
reaches all of them; none is left as a zombie. Forked by the host. Dies with the host, and the worker with the keeper.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import time
import traceback
from typing import NoReturn

from grpo_run.runtime.processes.parent_death import die_with_parent
from grpo_run.trainers.rewards.workers.messages import receive_frame, send_frame
from grpo_run.trainers.rewards.workers.worker import work
from grpo_run.watchdog.processes import list_processes, read_stat

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
END_SECONDS = 10.0
"""How long killed processes may take to exit. One in uninterruptible sleep may take longer, and is left then."""
_LOOK_SECONDS = 0.01


def keep(control: socket.socket, tasks: socket.socket, heartbeat: int) -> NoReturn:
    """Fork the worker, wait for its end or the rank's request, and end everything.

    Args:
        control: a frame on it, or its end, is the request. The keeper reports `started`, `exited` and `gone` on it.
        tasks: the worker's connection to the rank.
        heartbeat: descriptor of the memory that the worker stamps.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        _become_worker(control, tasks, heartbeat, keeper)
    tasks.close()
    os.close(heartbeat)
    _report(control, "started", pid=worker)
    status = _await_end(control, worker)
    if status is not None:
        _report(control, "exited", status=status)
    killed = _end_all(worker)
    _report(control, "gone", killed=killed)
    os._exit(0)


def _become_worker(control: socket.socket, tasks: socket.socket, heartbeat: int, keeper: int) -> NoReturn:
    try:
        die_with_parent(keeper)
        control.close()
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            # the kernel's choice if memory runs out: the rank would lose its step
            with open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
        except OSError:
            pass
        work(tasks, heartbeat)
    except BaseException:  # noqa: BLE001 - the keeper's code must not go on in this process
        traceback.print_exc()
    finally:
        os._exit(1)


def _await_end(control: socket.socket, worker: int) -> int | None:
    """Return the worker's wait status; None if the rank has asked for the end."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for pid in _children():
            if pid != worker:
                _reap(pid)
        found, status = os.waitpid(worker, os.WNOHANG)
        if found:
            return status
        # without a time limit: the hang detector proves that a rank is stuck only if its processes are
        ready = {descriptor for descriptor, _ in poll.poll()}
        if control.fileno() in ready:
            receive_frame(control)
            return None
        os.read(woken, 4096)


def _end_all(worker: int) -> int:
    """Kill children until there are none, and return how many there were besides the worker."""
    killed: set[int] = set()
    deadline = time.monotonic() + END_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        for pid in children:
            if pid not in killed:
                killed.add(pid)
                os.kill(pid, signal.SIGKILL)  # a child of this process, also if it is a zombie
            _reap(pid)
        time.sleep(_LOOK_SECONDS)
    return len(killed - {worker})


def _children() -> list[int]:
    own = os.getpid()
    try:
        with open(f"/proc/self/task/{own}/children", "rb") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:  # a kernel without this file
        stats = (read_stat(pid) for pid in list_processes())
        return [stat.pid for stat in stats if stat is not None and stat.parent == own]


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # it is not a child any more
        os.waitpid(pid, os.WNOHANG)


def _report(control: socket.socket, event: str, **fields: int) -> None:
    with contextlib.suppress(OSError):  # the rank does not listen any more
        send_frame(control, json.dumps({"event": event, **fields}).encode())
