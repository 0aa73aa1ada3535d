"""Process attributes that the kernel enforces: termination with the parent, and permission to be traced.

The forkserver and every rank call `die_with_parent`, so that a supervisor killed by SIGKILL leaves no
orphans. Linux only (prctl(2)). Does not cover processes that a rank starts itself.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
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


def allow_tracing_by(pid: int) -> None:
    """Allow a process and its descendants to read the stack of this process.

    Needed where Yama's `ptrace_scope` is 1 (Debian, Ubuntu), because ranks and py-spy are siblings. A kernel
    without Yama refuses the request (EINVAL), and permits tracing anyway.

    Args:
        pid: of the process that may trace.
    """
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
