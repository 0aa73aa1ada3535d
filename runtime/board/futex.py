"""Wait for a word of shared memory to change without using the CPU: Linux' futex(2), which Python does not offer.

Called by `exchange.py`. Processes that map the same file share its futexes. Where the system call is not known
or refused, waiters poll instead. Does not read the word.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import time

POLL_SECONDS = 0.001
"""Interval at which a waiter returns where futexes cannot be used."""

_NUMBERS = {"x86_64": 202, "aarch64": 98}  # asm/unistd.h
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # not private: the word is shared with other processes
_EVERYBODY = 2**31 - 1
_EXPECTED = frozenset({errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_number = _NUMBERS.get(platform.machine()) if ctypes.sizeof(ctypes.c_void_p) == 8 else None
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long, ctypes.c_void_p, ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long,
]  # fmt: skip


def wait(address: int, expected: int, timeout_seconds: float) -> None:
    """Sleep while the 32-bit word at `address` is `expected`; the interpreter's lock is released.

    Returns after a wake-up, after the time limit, after a signal, and at once if the word has another value. The
    caller reads the word again.

    Args:
        address: of the word, divisible by four.
        expected: the word's value as the caller has read it.
        timeout_seconds: not negative.
    """
    if _number is not None:
        limit = _Timespec(int(timeout_seconds), int(timeout_seconds % 1 * 1e9))
        if _syscall(_number, address, _FUTEX_WAIT, expected, ctypes.addressof(limit), None, 0) == 0:
            return
        if ctypes.get_errno() in _EXPECTED:
            return
    time.sleep(min(POLL_SECONDS, timeout_seconds))


def wake(address: int) -> None:
    """Wake all who wait for the word at `address`. Call it after the word has been changed."""
    if _number is not None:
        _syscall(_number, address, _FUTEX_WAKE, _EVERYBODY, None, None, 0)
