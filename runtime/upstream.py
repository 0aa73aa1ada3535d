"""Every private name of Python and of torch that the runtime leans on.

One place, so that a contract test (`tests/unit/runtime/test_upstream.py`) says at once what a new release
moved. Called by `forkserver.py`, `agent.py`, `writer.py` and a rank's bootstrap. Holds no behaviour of our own beyond the touch itself.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

AGENT_METHODS = (
    "_assign_worker_ranks",
    "_exit_barrier",
    "_initialize_workers",
    "_invoke_run",
    "_monitor_workers",
    "_rendezvous",
    "_set_local_rank_env",
    "_shutdown",
    "_start_workers",
    "_stop_workers",
)
"""Methods of torch's LocalElasticAgent that `agent.Agent` overrides or calls."""

AGENT_ATTRIBUTES = ("_remaining_restarts", "_worker_group")
_MAIN_PROCESS = type(multiprocessing.current_process())
"""Python deletes the class's name; this module is first imported where the current process still is one."""

FORKSERVER_ATTRIBUTES = ("_forkserver_alive_fd", "_forkserver_pid")


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the supervisor's `__main__` again in each child it starts."""
    main: Any = sys.modules["__main__"]
    kept = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
    try:
        for name in kept:
            setattr(main, name, None)
        yield
    finally:
        for name, value in kept.items():
            setattr(main, name, value)


def forkserver_pid() -> int | None:
    """The running forkserver of this process, if any."""
    server: Any = multiprocessing.forkserver._forkserver
    return server._forkserver_pid  # type: ignore[no-any-return]


def forget_child(process: Any) -> None:
    """Keep multiprocessing from waiting, at this interpreter's end, for a child that may never go.

    One in uninterruptible sleep (a file system that hangs) outlives SIGKILL, and `daemon=True` only has it killed
    before it is waited for.
    """
    children: set[Any] = multiprocessing.process._children  # type: ignore[attr-defined]
    for child in [child for child in children if child is process]:
        children.discard(child)


def cuda_was_opened_before_fork() -> bool:
    """Whether this process was forked from one that had opened CUDA, and so cannot use it."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda._is_in_bad_fork()


def wait_for_threads() -> None:
    """What the interpreter does first at its end: wait for threads that are not daemons."""
    threading._shutdown()  # type: ignore[attr-defined]


def run_exit_handlers() -> None:
    """What it does next: call what was registered with `atexit`, once."""
    atexit._run_exitfuncs()


def become_main_process() -> None:
    """Make a forkserver child look like a program started by itself.

    Its copy of the pipe that keeps the forkserver alive is closed (the supervisor alone decides that), and
    `multiprocessing` is told that this is a main process: not somebody's child, free to have daemons.
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
"""Attributes of ProcessGroupGloo's `_Options` that name a group for the Flight Recorder."""


def named_gloo_group(store: Any, rank: int, world_size: int, *, name: str, timeout_seconds: float) -> Any:
    """A Gloo group outside `torch.distributed`'s registry, under a name that the Flight Recorder shows."""
    from datetime import timedelta

    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=timeout_seconds)
    options._devices = [gloo.create_default_device()]
    options.group_name = name
    options.global_ranks_in_group = list(range(world_size))
    return gloo(store, rank, world_size, options)


# ---- torch's file format, for `writer.py` ----


@contextlib.contextmanager
def torch_archive(
    path: str, *, compute_crc32: bool, storage_alignment: int
) -> Iterator[Callable[[str, int, int], None]]:
    """Write an archive as `torch.save(…, path)` does; yields what writes one record: name, address, bytes.

    `torch.save` opens the path itself when it is ASCII, and then names the archive after it; else it writes
    through a file of Python's, and the archive is called "archive".

    Raises:
        RuntimeError: torch cannot write.
        OSError: the path is not ASCII and cannot be opened.
    """
    import ctypes

    import torch

    with contextlib.ExitStack() as stack:
        target = path if path.isascii() else stack.enter_context(open(path, "wb"))
        writer: Any = torch._C.PyTorchFileWriter(target, compute_crc32, storage_alignment)

        def write_record(name: str, address: int, size_bytes: int) -> None:
            if size_bytes == 0:
                writer.write_record(name, b"", 0)
                return
            # torch takes a storage, and makes one of read-only memory only with a warning: it reads it alone
            memory = (ctypes.c_ubyte * size_bytes).from_address(address)
            storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
            writer.write_record(name, storage, size_bytes)

        try:
            yield write_record
        finally:
            writer.write_end_of_file()
