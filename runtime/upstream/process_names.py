"""Private names of Python and torch that processes, snapshots and the bootstrap of a rank rely on.

Names of the forkserver, interpreter shutdown, Python threads (to tell one that waits for work from one that
works) and warnings, Gloo options and torch's file archives. The contract tests in
`tests/unit/runtime/upstream/` report what a new release has changed. Contains no behaviour beyond these
calls.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.util
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

AGENT_METHODS = (
    "_assign_worker_ranks", "_exit_barrier", "_initialize_workers", "_invoke_run", "_monitor_workers",
    "_rendezvous", "_set_local_rank_env", "_shutdown", "_start_workers", "_stop_workers",
)  # fmt: skip
"""Methods of torch's LocalElasticAgent that `processes.agent.Agent` overrides or calls."""

AGENT_ATTRIBUTES = ("_remaining_restarts", "_worker_group")
_MAIN_PROCESS = type(multiprocessing.current_process())
"""Python deletes the name of this class. The module is first imported in a main process, which is an instance
of it."""

FORKSERVER_ATTRIBUTES = ("_forkserver_address", "_forkserver_alive_fd", "_forkserver_pid")


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Prevent multiprocessing from importing the supervisor's `__main__` again in each child that it
    starts.
    """
    main: Any = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        for name in kept:
            setattr(main, name, None)
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


LONGEST_TEMPORARY_FOLDER_BYTES = 60
"""`sun_path` of unix(7) has 108 bytes; multiprocessing adds `/pymp-xxxxxxxx/listener-xxxxxxxx`."""
SHORT_FOLDER = "/tmp"


def use_short_temporary_folder() -> None:
    """Let multiprocessing put the sockets of this process and its children into a short folder if `$TMPDIR`
    is long: it is made now, and used from here on.
    """
    folder = tempfile.gettempdir()
    if len(os.fsencode(folder)) > LONGEST_TEMPORARY_FOLDER_BYTES:
        try:
            tempfile.tempdir = SHORT_FOLDER
            multiprocessing.util.get_temp_dir()
        finally:
            tempfile.tempdir = folder


def temporary_folder() -> str | None:
    """Return multiprocessing's folder of this process, which it removes when it exits; None without one."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config.get("tempdir")


def forkserver_pid() -> int | None:
    """Return the process id of this process's forkserver; None if it is not running."""
    server: Any = multiprocessing.forkserver._forkserver
    return server._forkserver_pid  # type: ignore[no-any-return]


def forget_server() -> None:
    """Let multiprocessing start another forkserver when it next needs one, though the first may not have
    exited.
    """
    # not replaced: multiprocessing's functions are bound to this instance
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    for name in FORKSERVER_ATTRIBUTES:
        setattr(server, name, None)


def forget_child(process: Any) -> None:
    """Prevent multiprocessing from waiting for a child when this interpreter exits.

    A child in uninterruptible sleep (a file system that hangs) survives SIGKILL. A daemonic child is killed
    at exit, but multiprocessing waits for it afterwards.

    Args:
        process: the child's `multiprocessing.Process`.
    """
    children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
    for child in [child for child in children if child is process]:
        children.discard(child)


def cuda_was_opened_before_fork() -> bool:
    """Return whether this process is a fork whose parent had initialized CUDA, so it cannot use CUDA."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def wait_for_threads() -> None:
    """Wait for threads that are not daemons, as the interpreter does first when it exits."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_handlers() -> None:
    """Call the functions registered with `atexit`, once, as the interpreter does next."""
    atexit._run_exitfuncs()


def become_main_process() -> None:
    """Make a forkserver child behave like a program started from a shell.

    Closes its copy of the pipe that keeps the forkserver alive, so that only the supervisor keeps it alive.
    Tells `multiprocessing` that this is a main process, which may have daemonic children.
    """
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
    multiprocessing.forkserver._forkserver = type(server)()
    process: Any = multiprocessing.process
    process._current_process = _MAIN_PROCESS()
    process._parent_process = None
    multiprocessing.set_start_method(None, force=True)


GLOO_OPTIONS = ("_devices", "_timeout", "global_ranks_in_group", "group_name")
"""Attributes of ProcessGroupGloo's `_Options` that give a group its name in the Flight Recorder."""


def named_gloo_group(store: Any, rank: int, world_size: int, *, name: str, timeout_seconds: float) -> Any:
    """Return a Gloo group that only the caller knows, with a name that the Flight Recorder shows.

    Args:
        store: used by the ranks to find each other.
        rank: of this process.
        world_size: number of ranks.
        name: of the group.
        timeout_seconds: of each collective.
    """
    from datetime import timedelta

    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    options._devices = [gloo.create_default_device()]
    options.group_name = name
    options.global_ranks_in_group = list(range(world_size))
    return gloo(store, rank, world_size, options)


THREAD_TARGET = "_target"
"""Attribute of `threading.Thread`: the function that it runs."""
IDLE_WORKER = "work_queue.get(block=True)"
"""Source of the line at which an idle thread of a `ThreadPoolExecutor` waits
(`concurrent.futures.thread._worker`).
"""
RUNNING_THREADS = "_active"
"""Attribute of `threading`: the running threads by identifier. `threading.enumerate` takes a lock."""
EVENT_CONDITION = "_cond"
CONDITION_WAITERS = "_waiters"
"""Attributes of an event and of its condition: the locks of the threads that wait."""

FILTERS_CHANGED = "_filters_mutated" if sys.version_info < (3, 14) else "_filters_mutated_lock_held"
"""Function of `warnings` that a change of the filters calls; it makes Python forget which warnings it has
shown.
"""


def running_threads() -> list[threading.Thread]:
    """Return Python's threads without taking a lock; empty if this Python stores them elsewhere."""
    return list(getattr(threading, RUNNING_THREADS, {}).values())


def has_waiter(event: Any) -> bool:
    """Whether a thread waits for a `threading.Event`; False if this Python stores that elsewhere."""
    return bool(getattr(getattr(event, EVENT_CONDITION, None), CONDITION_WAITERS, ()))
