"""How processes of a run start: their command, the signals that they ignore, and what the kernel enforces.

A scheduler sends a signal that `--signals-to-handle` names to every process of a job. The supervisor alone
turns it into a stop (`runtime/launching/`); ranks and helpers ignore it, and so does what they start, until
the script sets a handler. The option reaches every process in the environment variable that torch elastic
uses. The forkserver and every rank call `die_with_parent`, so that a supervisor killed by SIGKILL leaves no
orphans (prctl(2)); that does not cover processes that a rank starts itself. Called by what starts processes.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_run.runtime.errors import UsageError

VARIABLE = "TORCHELASTIC_SIGNALS_TO_HANDLE"
UNNAMED = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
"""torch's default. Ranks keep their dispositions of these: the first ends them, the others come from a
terminal.
"""
REFUSED = frozenset({signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD})
"""Signals that cannot be handled, or that the supervisor needs itself."""


def parse_signals(names: str) -> tuple[signal.Signals, ...]:
    """Return the signals of a comma-separated list of names, as torchrun's option has it.

    Raises:
        UsageError: a name is unknown, or its signal cannot stop a run.
    """
    found = []
    for name in filter(None, (word.strip() for word in names.split(","))):
        number = signal.Signals.__members__.get(name)
        if number is None or number in REFUSED:
            raise UsageError(
                f"--signals-to-handle {names}: {name} is not a signal that can stop a run; write names such"
                " as SIGTERM,SIGUSR1"
            )
        found.append(number)
    return tuple(found)


def ignored_signals() -> tuple[int, ...]:
    """Return the signals that this run's ranks and helpers ignore, by number."""
    return tuple(sorted({int(number) for number in parse_signals(os.environ.get(VARIABLE, ""))} - UNNAMED))


@contextmanager
def inherited_as_ignored() -> Iterator[None]:
    """Within the block, ignore these signals and SIGINT in this process, so that processes started there do
    too.

    Ctrl-C would end one with a traceback while it starts.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ignored_signals())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


STARTED_WITH = "started_with"
"""Name in `__main__` of the names of the modules that the interpreter has started with."""


def interpreter_command(entry: str) -> list[str]:
    """Return the command that calls an entry point.

    Python puts the working directory on the import path of `python -c`, unless it is asked not to; the
    bootstrap puts there what the script expects.

    Args:
        entry: `module:function`, called without arguments.
    """
    module, _, function = entry.partition(":")
    numbers = ignored_signals()
    # at once: such a signal may arrive while the interpreter imports, and its handler here is not inherited
    ignore = f"import signal; [signal.signal(n, signal.SIG_IGN) for n in {numbers}]\n" if numbers else ""
    code = (
        f"import sys; {STARTED_WITH} = frozenset(sys.modules)\n"
        f"{ignore}if not getattr(sys.flags, 'safe_path', False): del sys.path[0]\n"
        f"from {module} import {function} as f; f()"
    )
    return [sys.executable, "-u", "-c", code]


PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PTRACER = 0x59616D61


def die_with_parent(expected_parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent exits.

    Args:
        expected_parent: process id of the parent. If the parent is already another process, the expected one
            exited before the request took effect, and this process exits immediately.

    Raises:
        OSError: the kernel refuses the request.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != expected_parent:
        os._exit(128 + signal.SIGKILL)


def become_subreaper() -> bool:
    """Become the parent of all future orphans among this process's descendants.

    Returns:
        whether the kernel has agreed.
    """
    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def allow_tracing_by(pid: int) -> None:
    """Allow a process and its descendants to read the stack of this process.

    Needed where Yama's `ptrace_scope` is 1 (Debian, Ubuntu), because ranks and py-spy are siblings. A kernel
    without Yama refuses the request (EINVAL), and permits tracing anyway.

    Args:
        pid: of the process that may trace.
    """
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
