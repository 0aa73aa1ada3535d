"""Program of the warm launcher: imports everything once, then forks a Python program for each request.

Started and used by `warm.py`; arguments: the descriptor of its listening socket. The code is compiled under
the name `<warm launcher>`, so that its frames are never taken for a user's.

A forked child is what `python script arguments` would start: own session, environment, working directory,
standard streams and `sys.path`. Two things differ: after its threads and `atexit` functions have ended, the
child does not take its modules apart; and when it starts the forkserver of `multiprocessing`, that server is
forked too, instead of a new interpreter that imports everything again. The server is not forked when the
environment holds other values than the launcher's for variables that libraries read at import.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.metadata
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
from typing import Any, NoReturn

IMPORTED = (
    "grpo_run.cli.main",
    "grpo_run.cli.launch",
    "grpo_run.runtime.launching._supervise",
    "grpo_run.cli.train",
    "grpo_run.dashboards.metrics.server",
    "grpo_run.dashboards.terminal.terminal",
    "grpo_run.runtime.processes.agent",
    "grpo_run.runtime.processes.output",
    "grpo_run.runtime.snapshots.drain_scheduler",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.distributed.run",
    "accelerate.commands.launch",
)
"""What `grpo-run launch` imports in the supervisor; `PRELOAD` is what it imports in the forkserver."""
PRELOAD = "grpo_run.runtime.launching.preload"
LIBRARIES = "grpo_run.runtime.rank.preload"
FORK_SAFE_THREADS = {"jemalloc_bg_thd"}
"""pyarrow's allocator, which handles forks itself; the forkserver of every run has this thread too."""
SUPERVISOR_PID = "GRPO_RUN_SUPERVISOR_PID"
NAMESPACES = ("uts", "ipc", "net", "pid", "mnt")
"""Those of a test's host, in the order in which a child enters them."""
EXIT = struct.Struct("i")


class BecomeForkserver(BaseException):
    """Unwinds the stack of a forked supervisor, which then runs the forkserver."""

    def __init__(self, command: str, descriptors: dict[int, int]) -> None:
        self.command = command
        self.descriptors = descriptors


class Launcher:
    """Forks one process per request and reports its exit on the request's connection."""

    def __init__(self, listener: socket.socket, environment: dict[str, str]) -> None:
        self.listener = listener
        self.read_at_import = importlib.import_module("grpo_run.runtime.launch.resolution").READ_AT_IMPORT
        self.environment = self.import_time(environment)
        self.path = [entry for entry in sys.path if entry]
        for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            if entry in self.path:
                self.path.remove(entry)
        self.has_forked_server = False
        self.running: dict[int, tuple[int, socket.socket]] = {}
        self.selector = selectors.DefaultSelector()

    def import_time(self, environment: dict[str, str]) -> dict[str, str]:
        """Return the variables that libraries read when they are imported.

        Not PYTHONPATH, which a child sets itself, nor ACCELERATE_USE_*, which no installed version reads at
        import.
        """
        return {
            name: value
            for name, value in environment.items()
            if self.read_at_import.fullmatch(name) and not name.startswith(("PYTHONPATH", "ACCELERATE_USE_"))
        }

    def serve(self) -> Any:
        """Answer requests. Returns only in a forked child: the function to call there."""
        self.selector.register(self.listener, selectors.EVENT_READ)
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is self.listener:
                    child = self.accept()
                    if child is not None:
                        return child
                else:
                    self.report(int(key.fd))

    def accept(self) -> Any:
        """Fork a child for one request; return its function in the child, and None in the launcher."""
        connection, _ = self.listener.accept()
        size = struct.unpack("I", connection.recv(4, socket.MSG_WAITALL))[0]
        streams = array.array("i", [0, 0, 0])
        _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(streams.itemsize * 3))
        streams.frombytes(ancillary[0][2])
        del streams[:3]
        request = json.loads(connection.recv(size, socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            return self.become(request, streams, connection)
        for descriptor in streams:
            os.close(descriptor)
        pidfd = os.pidfd_open(pid)
        self.running[pidfd] = (pid, connection)
        self.selector.register(pidfd, selectors.EVENT_READ)
        return None

    def report(self, pidfd: int) -> None:
        """Send the client the exit code of its process."""
        pid, connection = self.running.pop(pidfd)
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        # the client may have ended before its process
        with contextlib.suppress(OSError):
            connection.sendall(EXIT.pack(os.waitstatus_to_exitcode(status)))
        connection.close()

    def become(self, request: dict[str, Any], streams: array.array[int], connection: socket.socket) -> Any:
        """Turn this fork into the requested program and send its pid; return the function that runs it."""
        os.setsid()
        for _, other in self.running.values():
            other.close()
        self.selector.close()
        self.listener.close()
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        if request["inside"]:
            connection.sendall(EXIT.pack(os.getpid()))
            connection.close()
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            enter(request["inside"])
            os.setsid()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])
        set_path(self.path)
        tempfile.tempdir = None  # the launcher's; this process may have another TMPDIR
        sys.argv = list(request["arguments"])
        if request["script_directory_in_path"]:
            sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        multiprocessing.util.spawnv_passfds = self.spawn
        import setproctitle

        setproctitle.setproctitle(" ".join(["python", *sys.argv]))
        show_environment()
        if not request["inside"]:
            connection.sendall(EXIT.pack(os.getpid()))
            connection.close()
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        return lambda: runpy.run_path(sys.argv[0], run_name="__main__")

    def spawn(self, path: Any, arguments: Any, descriptors: Any) -> int:
        """Replace `multiprocessing.util.spawnv_passfds`: fork the forkserver, spawn everything else."""
        command = arguments[-1]
        if (
            not command.startswith("from multiprocessing.forkserver import main")
            or self.import_time(dict(os.environ)) != self.environment
        ):
            return fresh(path, arguments, descriptors)
        if threading.active_count() > 1:
            # a fork would not copy them; the first forkserver of a run starts before any, or every launch
            # would be cold
            assert self.has_forked_server or PRELOAD not in command, threading.enumerate()
            return fresh(path, arguments, descriptors)
        self.has_forked_server = True
        pid = os.fork()
        if pid == 0:
            # the frames below close the originals as they unwind
            raise BecomeForkserver(command, {number: os.dup(number) for number in descriptors})
        return pid

    def become_forkserver(self, server: BecomeForkserver) -> None:
        """Run the forkserver in this process, with the descriptors it was given and no others."""
        highest = max([*server.descriptors, *server.descriptors.values()]) + 1
        safe = {
            number: os.dup2(copy, highest + index)
            for index, (number, copy) in enumerate(server.descriptors.items())
        }
        for number, copy in safe.items():
            os.dup2(copy, number, inheritable=True)
        kept = sorted(server.descriptors)
        for low, high in zip([2, *kept], [*kept, os.sysconf("SC_OPEN_MAX")], strict=True):
            os.closerange(low + 1, high)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        multiprocessing.forkserver._forkserver.__init__()
        multiprocessing.resource_tracker._resource_tracker.__init__()
        set_path(self.path)
        show_environment()
        sys.argv = ["-c"]
        exec(compile(server.command, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102


fresh: Any = multiprocessing.util.spawnv_passfds


def enter(target: int) -> None:
    """Go on in the namespaces of a process, as `nsenter` does: in a child, for which this process waits."""
    libc = ctypes.CDLL(None, use_errno=True)
    for descriptor in [os.open(f"/proc/{target}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]:
        if libc.setns(descriptor, 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    pid = os.fork()
    if pid == 0:
        return
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def show_environment() -> None:
    """Let /proc show the variables of this process, as after an exec, where it shows the launcher's."""
    with open("/proc/self/stat") as file:
        begin, end = map(int, file.read().rpartition(")")[2].split()[47:49])
    shown = b"".join(name + b"=" + value + b"\0" for name, value in os.environb.items())
    assert len(shown) <= end - begin, "too little room for the environment"
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def native_threads() -> set[str]:
    """Names of this process's threads other than the main one."""
    names = {}
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/comm") as file:
            names[int(task)] = file.read().strip()
    names.pop(os.getpid())
    return set(names.values())


def set_path(base: list[str]) -> None:
    """Set `sys.path` as a new interpreter with this environment would, in ranks as well."""
    own = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = [*own, *base]
    importlib.import_module("grpo_run.runtime.processes.forkserver")._IMPORT_PATH[:] = sys.path


def load() -> Launcher:
    """Import what supervisor and forkserver import; this process then has one thread and dies with pytest."""
    descriptor = int(sys.argv[1])
    environment = dict(os.environ)  # before libraries set variables of their own
    os.environ[SUPERVISOR_PID] = sys.argv[2]
    # otherwise every supervisor and every rank parses the metadata of packages again
    for name in ("metadata", "version"):
        setattr(importlib.metadata, name, functools.cache(getattr(importlib.metadata, name)))
    for name in (PRELOAD, *IMPORTED):  # first, so that it records torch and accelerate as its own imports
        importlib.import_module(name)
    del os.environ[SUPERVISOR_PID]
    # importing them ties a process to its supervisor, so the forkserver must import them again
    for name in (PRELOAD, LIBRARIES):
        del sys.modules[name]
    assert threading.active_count() == 1, threading.enumerate()
    assert not native_threads() - FORK_SAFE_THREADS, "a library starts threads when it is imported"
    # the rendezvous searches every loaded module for the name of its caller, for a log line: 0.3 s CPU with
    # TRL's modules
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.__dict__["get_method_name"] = lambda depth=2: "rendezvous"
    # otherwise the first save of a process compiles patterns for the weights of all models
    importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("qwen2")
    gc.collect()
    gc.freeze()
    return Launcher(socket.socket(fileno=descriptor), environment)


def main() -> None:
    """Serve requests; in a fork, run what the request asks for."""
    launcher = load()
    work = launcher.serve()
    code: Any = None
    try:
        try:
            work()
        except BecomeForkserver as server:
            become = server
        else:
            leave(None)
        launcher.become_forkserver(become)
    except SystemExit as end:
        code = end.code
        if not isinstance(code, int | None):
            raise
    leave(code)


def leave(code: int | None) -> NoReturn:
    """Exit as the interpreter does, but leave its modules to the kernel: taking them apart costs 0.5 s of
    CPU.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit((code or 0) & 0xFF)


main()
