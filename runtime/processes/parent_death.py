"""Ties a process's life to its parent's, through the kernel.

Used by the forkserver and by every rank, so that a supervisor killed with SIGKILL leaves no orphan.
Linux only (`prctl(2)`, PR_SET_PDEATHSIG). Does not cover processes that a rank starts itself.
"""

from __future__ import annotations

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_PTRACER = 0x59616D61


def die_with_parent(expected_parent: int) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends.

    Args:
        expected_parent: pid of the parent; when it is already another one, the parent died before the
            request took effect, and this process ends at once.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_PDEATHSIG): {os.strerror(error)}")
    if os.getppid() != expected_parent:
        os._exit(128 + signal.SIGKILL)


def let_be_traced_by(pid: int) -> None:
    """Let `pid` and what it starts read this process's stack, where Yama's `ptrace_scope` is 1 (Debian, Ubuntu).

    Ranks and py-spy are siblings, which Yama keeps apart. A kernel without Yama has nothing to allow: its refusal (EINVAL)
    is no error.
    """
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(pid), 0, 0, 0)
