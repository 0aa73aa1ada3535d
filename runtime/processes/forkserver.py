"""Start ranks as forks of an interpreter that has imported torch, transformers and trl.

A fresh interpreter needs 5 to 9 s to import TRL; a child of this server needs none of it. Called by
`ranks.py`. The server starts while the supervisor still imports torch, and exits with the supervisor. Does not
run the user's script: a child calls the entry point that it is given. `server_start.py` waits until the server can fork.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import reduction
from multiprocessing.context import ForkServerProcess
from typing import Any

from grpo_run.runtime import upstream
from grpo_run.runtime.named_signals import inherited_as_ignored
from grpo_run.runtime.processes import termination
from grpo_run.runtime.processes.parent_death import die_with_parent
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


def start_server(preload: Sequence[str], environment: Mapping[str, str]) -> int:
    """Start the server, which imports modules in the background, and return its pid. Does nothing else if it is running.

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
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        # children restore the handler of Ctrl-C
        with upstream.hidden_main(), inherited_as_ignored():
            forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    server = upstream.forkserver_pid()
    assert server is not None
    return server


def replace_server() -> None:
    """Start another server, which imports nothing, after the first one has ended."""
    start_server([], dict(_environment))


def continue_server() -> None:
    """Continue the server if a signal has stopped it, as Ctrl-Z does: no rank could start, and no exit be reported."""
    server = upstream.forkserver_pid()
    stat = read_stat(server) if server is not None else None
    if stat is not None and stat.state == "T":
        os.kill(stat.pid, signal.SIGCONT)


def server_end(timeout_seconds: float) -> ProcessEnd | None:
    """Return how the server ended; None if it lives, or is not running.

    Args:
        timeout_seconds: how long to wait for its end.
    """
    server = upstream.forkserver_pid()
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
    with upstream.hidden_main():
        process.start()
    return process


class _StandardInput:
    """Standard input of this process. A child receives it as a descriptor number; None if it is closed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (reduction.DupFd(0) if sys.__stdin__ is not None else None,)


def _receive(duplicate: Any) -> int | None:
    return None if duplicate is None else int(duplicate.detach())


def _run_child(entry: str, environment: dict[str, str], directory: str, standard_input: int | None) -> None:
    """Give the child its own session and environment, make it a main process again, and call the entry point."""
    server = os.getppid()
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
    upstream.become_main_process()
    if "numpy" in sys.modules:
        # the fork copied the server's random generators; a fresh interpreter would have seeded its own
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)()
