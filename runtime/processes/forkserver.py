"""The forkserver: start ranks as forks of an interpreter that has imported torch, transformers and TRL.

A fresh interpreter needs 5 to 9 s to import TRL; a child of this server needs none of it. The server starts
while the supervisor still imports torch, and exits with the supervisor. `await_server` waits until it can
fork. A server that hangs in an import, or exits, is replaced by one that imports nothing; a child of the
replacement becomes a fresh interpreter (`runtime/rank/bootstrap.py`). An import that raises does not end
the server; its children know of it. Called by `ranks.py`, and by the supervisor before it starts ranks.
Does not run the user's script: a child calls the entry point that it is given.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.context import ForkServerProcess
from typing import Any

from grpo_run.runtime.processes import adoption, termination
from grpo_run.runtime.processes.starting import die_with_parent, inherited_as_ignored
from grpo_run.runtime.upstream import process_names
from grpo_run.watchdog.observation import ProcessEnd
from grpo_run.watchdog.processes import read_stat

_IMPORT_PATH = [entry for entry in sys.path if entry]
"""In the server: the import path that Python derived from the environment, without the entry of `python -c`.
"""

SUPERVISOR_PID = "GRPO_RUN_SUPERVISOR_PID"
_environment: dict[str, str] = {}
"""Additional variables of this process's server."""


def import_path() -> list[str]:
    """In the server: return the import path of a script, without the entry for the script itself."""
    return list(_IMPORT_PATH)


def start_server(preload: Sequence[str], environment: Mapping[str, str]) -> None:
    """Start the server, which imports modules in the background. Does nothing if it is running.

    Libraries read environment variables at import: they see the values that are set now.

    Args:
        preload: names of the modules to import.
        environment: additional variables, which /proc shows for every fork of the server.
    """
    from multiprocessing import forkserver

    _environment.update(environment)
    os.environ[SUPERVISOR_PID] = str(os.getpid())
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    process_names.use_short_temporary_folder()
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        # children restore the handler of Ctrl-C
        with process_names.hidden_main(), inherited_as_ignored():
            forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def stop_server(timeout_seconds: float) -> None:
    """Stop the server, if it runs: this process goes on without a run. It exits when its pipe is closed."""
    server = process_names.forkserver_pid()
    if server is None:
        return
    process_names.forget_server()
    termination.wait_for_exits([server], timeout_seconds)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(server, os.WNOHANG)


def continue_server() -> None:
    """Continue the server if a signal has stopped it, as Ctrl-Z does: no rank could start, and no exit be
    reported.
    """
    server = process_names.forkserver_pid()
    stat = read_stat(server) if server is not None else None
    if stat is not None and stat.state == "T":
        os.kill(stat.pid, signal.SIGCONT)


def server_end(timeout_seconds: float) -> ProcessEnd | None:
    """Return how the server ended; None if it lives, or is not running.

    Args:
        timeout_seconds: how long to wait for its end.
    """
    server = process_names.forkserver_pid()
    if server is None:
        return None
    termination.wait_for_exits([server], timeout_seconds)
    try:
        # not reaped: multiprocessing does that when it starts the next server
        status = os.waitid(os.P_PID, server, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if status is None:
        return None
    exited = status.si_code == os.CLD_EXITED
    return ProcessEnd(
        exit_code=status.si_status if exited else None, signal=None if exited else status.si_status
    )


def start_child(entry: str, environment: Mapping[str, str], directory: str) -> ForkServerProcess:
    """Fork a rank from the server. It inherits our standard input, as a rank of torchrun does.

    Args:
        entry: `module:function` to call in the child, without arguments.
        environment: the complete environment of the child.
        directory: its working directory.

    Raises:
        OSError, EOFError: the server cannot fork or has exited.
    """
    process = multiprocessing.get_context("forkserver").Process(
        target=_run_child, args=(entry, dict(environment), directory, _StandardInput()), daemon=False
    )
    continue_server()
    with process_names.hidden_main():
        process.start()
    return process


class _StandardInput:
    """Standard input of this process. A child receives it as a descriptor number; None if it is closed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (reduction.DupFd(0) if sys.__stdin__ is not None else None,)


def _receive(duplicate: Any) -> int | None:
    return None if duplicate is None else int(duplicate.detach())


def _run_child(entry: str, environment: dict[str, str], directory: str, standard_input: int | None) -> None:
    """Give the child its own session and environment, make it a main process again, and call the entry
    point.
    """
    server, supervisor = os.getppid(), multiprocessing.parent_process()
    if supervisor is not None and server == supervisor.pid:
        os._exit(128 + signal.SIGKILL)  # the server has exited, and the supervisor adopted this process
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if standard_input is not None:
        os.dup2(standard_input, 0)
        os.close(standard_input)
        first = sys.__stdin__  # what Python made at start, closed by multiprocessing
        encoding, errors = (first.encoding, first.errors) if first is not None else (None, None)
        sys.stdin = sys.__stdin__ = open(0, encoding=encoding, errors=errors)  # type: ignore[misc]  # noqa: SIM115
    os.setsid()
    die_with_parent(server)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[:] = _IMPORT_PATH  # multiprocessing has set the supervisor's import path
    process_names.become_main_process()
    if "numpy" in sys.modules:
        # the fork copied the server's random generators; a fresh interpreter would have seeded its own
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)()


POLL_SECONDS = 0.05
IDLE_SECONDS = 30.0
"""An import that uses no CPU time for so long hangs: reading a file from a slow network takes less."""
TOTAL_SECONDS = 300.0
"""Imports from a slow network take minutes; a fresh interpreter then finds the files in memory."""
END_SECONDS = 10.0
"""How long a server may take to end after SIGKILL."""
_awaited: int | None = None
"""Process id of the server that has answered."""


def await_server(
    warn: Callable[[str], None], *, idle_seconds: float = IDLE_SECONDS, total_seconds: float = TOTAL_SECONDS
) -> None:
    """Wait until this process's forkserver can fork; do nothing if there is none, or if it has been waited
    for.

    Args:
        warn: tells the user that the server was given up, and why.
        idle_seconds: it is given up if it uses no CPU time for so long,
        total_seconds: or if it has not answered after so long.
    """
    global _awaited
    server = process_names.forkserver_pid()
    if server is None or server == _awaited:
        return
    failures: list[BaseException] = []
    thread = threading.Thread(target=_fork_once, args=(failures,), name="grpo-run-forkserver", daemon=True)
    thread.start()
    reason, cpu_seconds = "", 0.0
    began_at = active_at = time.monotonic()
    while thread.is_alive() and not reason:
        thread.join(POLL_SECONDS)
        continue_server()
        stat, now = read_stat(server), time.monotonic()
        if stat is not None and stat.cpu_seconds > cpu_seconds:
            cpu_seconds, active_at = stat.cpu_seconds, now
        if thread.is_alive() and now - active_at > idle_seconds:
            reason = f"an import of the libraries in advance did nothing for {idle_seconds:.0f} s"
        elif thread.is_alive() and now - began_at > total_seconds:
            reason = f"importing the libraries in advance took more than {total_seconds:.0f} s"
    if failures and not reason:
        reason = "the process that imports the libraries in advance has exited"
    if reason:
        _give_up(server, thread)
        warn(f"{reason}: ranks start as fresh interpreters")
    _awaited = process_names.forkserver_pid()


def _give_up(server: int, waiting: threading.Thread) -> None:
    """Kill a server, and start another one, which imports nothing."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, signal.SIGKILL)
    # not reaped: multiprocessing does that, and then starts another server
    termination.wait_for_exits([server], END_SECONDS)
    stat = read_stat(server)
    if stat is not None and stat.is_alive:
        adoption.abandon_server()  # it sleeps in the kernel; the thread, a daemon, waits on
    else:
        waiting.join(END_SECONDS)
    start_server([], dict(_environment))


def _fork_once(failures: list[BaseException]) -> None:
    """Let the server fork a process that exits at once. It answers after its imports only."""
    try:
        with process_names.hidden_main():
            process = multiprocessing.get_context("forkserver").Process(target=_nothing, daemon=False)
            process.start()
        process.join()
        process.close()
    except (OSError, EOFError) as error:
        failures.append(error)


def _nothing() -> None:
    """Run in a child that only shows that the server answers."""
