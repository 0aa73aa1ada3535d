"""Timeouts set on a socket of another process (`SO_RCVTIMEO`), which no system call shows.

Called by `channels.py` for a thread that receives or sends. The option is read from a copy of the descriptor,
which requires the right to trace the process, and Linux 5.6. Does not judge.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

_PIDFD_GETFD = 438  # the same number on all machines
_TIMEVAL = struct.Struct("=qq")
_libc = ctypes.CDLL(None, use_errno=True)


def has_time_limit(pid: int, descriptor: int) -> bool | None:
    """Whether receiving from or sending to a process's socket has a time limit; None if that is refused."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return None
    try:
        copy = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    finally:
        os.close(process)
    if copy < 0:
        return None
    with socket.socket(fileno=copy) as opened:
        try:
            limits = [
                opened.getsockopt(socket.SOL_SOCKET, option, _TIMEVAL.size)
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO)
            ]
        except OSError:
            return None
    return any(any(_TIMEVAL.unpack(limit)) for limit in limits)
