"""The host of a rank's workers, which forks them in milliseconds, and the keeper, the parent of each.

The host is forked from the rank before its script runs (`start`), while the rank has no threads and has not
opened an accelerator; it shares the memory of the preloaded modules. `WorkerHost` is the rank's side, used by
`_pool.py`. The host dies with the rank.

The host forks a keeper for each worker when the rank asks for one. As a subreaper the keeper adopts every
process that descends from its worker and loses its parent, also one in a session of its own. At the end it
kills its children until it has none, which reaches all of them and leaves no zombie. The keeper dies with
the host, and the worker with the keeper.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from grpo_run.runtime.features.reward_workers._messages import open_channel, receive, send
from grpo_run.runtime.features.reward_workers._worker import work
from grpo_run.runtime.processes.starting import become_subreaper, die_with_parent
from grpo_run.watchdog.processes import read_children

END_SECONDS = 10.0
"""How long killed processes may take to exit. One in uninterruptible sleep may take longer, and is left
then.
"""
_LOOK_SECONDS = 0.01


def keep(control: socket.socket, tasks: socket.socket) -> NoReturn:
    """Fork the worker, wait for its end, and end everything that it has started.

    Args:
        control: channel to the rank. The keeper sends the worker's pid with a descriptor of it (pidfd), by
            which the rank kills it, and its wait status when it has ended. The channel closes when everything
            has ended.
        tasks: the worker's channel to the rank.
    """
    become_subreaper()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    worker = os.fork()
    if worker == 0:
        _become_worker(control, tasks, keeper)
    tasks.close()
    _report(control, worker, [os.pidfd_open(worker)])
    # without a time limit: the hang detector proves that a rank is stuck only if its processes are
    while (ended := os.waitpid(-1, 0))[0] != worker:
        pass  # an orphan of the worker's
    _report(control, ended[1])
    _end_all()
    os._exit(0)


def _become_worker(control: socket.socket, tasks: socket.socket, keeper: int) -> NoReturn:
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
        work(tasks)
    except BaseException:  # noqa: BLE001 - the keeper's code must not go on in this process
        traceback.print_exc()
    finally:
        os._exit(1)


def _end_all() -> None:
    """Kill children until there are none."""
    deadline = time.monotonic() + END_SECONDS
    while (children := read_children(os.getpid())) and time.monotonic() < deadline:
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # a child of this process, also if it is a zombie
            os.waitpid(pid, os.WNOHANG)
        time.sleep(_LOOK_SECONDS)


def _report(control: socket.socket, number: int, descriptors: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError):  # the rank does not listen any more
        send(control, str(number).encode(), descriptors)


PREPARE_SECONDS = 300.0
"""How long the host may take to import libraries."""
ALWAYS_NEEDED = ("transformers.trainer_callback", "numpy")
"""Modules of what every call is given."""
HIDDEN_DEVICES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """What of the rank a worker must find again.

    Attributes:
        environment: of the rank.
        directory: its working directory.
        path: its import path.
        modules: to import before workers are forked, with those that cannot be imported left out.
        torch_threads: number of torch's threads, on which sums of floats depend.
        torch_dtype: name of torch's default dtype, such as `float32`.
        recursion_limit: of the interpreter.
    """

    environment: dict[str, str]
    directory: str
    path: tuple[str, ...]
    modules: tuple[str, ...]
    torch_threads: int
    torch_dtype: str
    recursion_limit: int


class WorkerHost:
    """The rank's side of its host.

    Args:
        connection: to the host.
        pid: of the host.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self._rank = os.getpid()
        self.pid = pid
        connection.settimeout(PREPARE_SECONDS)
        self._preparing = 0
        self._lock = threading.Lock()

    def prepare(self, modules: frozenset[str]) -> None:
        """Give the host the rank's surroundings, and let it import modules. Does not wait for that.

        Raises:
            OSError: the host has ended.
        """
        send(self._connection, pickle.dumps(_surroundings(modules)))
        self._preparing += 1

    def start_worker(self, control: socket.socket, tasks: socket.socket) -> None:
        """Start a keeper with its worker, once everything is imported.

        Args:
            control, tasks: their ends of the channels; the caller closes its own copies.

        Raises:
            OSError: the host has ended, or importing took too long.
        """
        with self._lock:
            while self._preparing:
                if receive(self._connection) is None:
                    raise ConnectionError("the host of the reward workers has ended")
                self._preparing -= 1
        send(self._connection, b"", [control.fileno(), tasks.fileno()])

    def close(self) -> None:
        """End the host. Its workers must have been ended before."""
        if os.getpid() != self._rank:
            return
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def start() -> WorkerHost:
    """Fork the host from this process, which must have one thread only."""
    ours, theirs = open_channel()
    rank = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            ours.close()
            die_with_parent(rank)
            _serve(theirs)
        finally:
            os._exit(1)
    theirs.close()
    return WorkerHost(ours, pid)


def _serve(connection: socket.socket) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; the rank decides
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle("grpo-run reward workers")
    signal.signal(signal.SIGCHLD, lambda number, frame: _reap_keepers())
    # without a time limit: the hang detector proves that a rank is stuck only if its processes are
    while (message := receive(connection)) is not None:
        if message.descriptors:
            _start_keeper(connection, *(socket.socket(fileno=one) for one in message.descriptors))
        else:
            _prepare(pickle.loads(message.content))
            send(connection, b"")
    os._exit(0)


def _start_keeper(connection: socket.socket, control: socket.socket, tasks: socket.socket) -> None:
    host = os.getpid()
    if os.fork() == 0:
        try:
            connection.close()
            die_with_parent(host)
            keep(control, tasks)
        finally:
            os._exit(1)
    control.close()
    tasks.close()


def _prepare(surroundings: WorkerEnvironment) -> None:
    os.environ.clear()
    os.environ.update(surroundings.environment)
    os.environ.update(dict.fromkeys(HIDDEN_DEVICES, ""))
    with contextlib.suppress(OSError):  # it may be gone
        os.chdir(surroundings.directory)
    sys.path[:] = surroundings.path
    sys.setrecursionlimit(surroundings.recursion_limit)
    import torch

    torch.set_num_threads(surroundings.torch_threads)
    torch.set_default_dtype(getattr(torch, surroundings.torch_dtype))
    for name in surroundings.modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _reap_keepers() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _surroundings(modules: frozenset[str]) -> WorkerEnvironment:
    """Return those of this process.

    Args:
        modules: that the functions need.
    """
    torch: Any = sys.modules["torch"]
    return WorkerEnvironment(
        environment=dict(os.environ),
        directory=os.getcwd(),
        path=tuple(sys.path),
        modules=tuple(sorted({*ALWAYS_NEEDED, *modules})),
        torch_threads=torch.get_num_threads(),
        torch_dtype=str(torch.get_default_dtype()).removeprefix("torch."),
        recursion_limit=sys.getrecursionlimit(),
    )
