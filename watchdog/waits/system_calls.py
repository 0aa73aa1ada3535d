"""What a thread waits for, decoded from the system call that it is in.

The kernel shows the call in /proc/PID/task/TID/syscall: number, six arguments, stack pointer and program
counter, or `running`. The end of a sleep is in the thread's memory, which the caller reads. Numbers are those
of x86-64 and AArch64; any other machine, a call without an entry here, and memory that cannot be read give an
unknown wait. Pure.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from grpo_run.watchdog.waits.looks import UNKNOWN, Wait, WaitKind

ReadMemory = Callable[[int, int], "bytes | None"]
"""Reads (address, size in bytes) of the thread's memory; None if that is refused."""

_NUMBERS = {
    "x86_64": {
        "poll": 7, "accept": 43, "wait4": 61, "futex": 202, "clock_nanosleep": 230, "epoll_wait": 232,
        "waitid": 247, "epoll_pwait": 281, "accept4": 288,
    },
    "aarch64": {
        "epoll_pwait": 22, "waitid": 95, "futex": 98, "clock_nanosleep": 115, "accept": 202, "accept4": 242,
        "wait4": 260,
    },
}  # fmt: skip
"""Numbers of the system calls that can be judged, from the kernel's tables (asm/unistd.h)."""

_NAMES = {
    machine: {number: name for name, number in numbers.items()} for machine, numbers in _NUMBERS.items()
}

_FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0, 9
_FUTEX_PRIVATE, _FUTEX_CLOCK_REALTIME = 128, 256
_CLOCK_MONOTONIC, _TIMER_ABSTIME = 1, 1
_P_PID = 1
_LOWEST_STACK_OF_64_BITS = 1 << 32

_TIMESPEC = struct.Struct("<qq")


def decode_wait(text: str, machine: str, read_memory: ReadMemory) -> Wait:
    """Return what a thread waits for, by its line of /proc/PID/task/TID/syscall.

    A process of 32 bits has other numbers; it is recognized by its stack pointer.

    Args:
        text: the line.
        machine: `platform.machine()`.
        read_memory: of the thread.
    """
    words = text.split()
    if len(words) != 9:
        return UNKNOWN  # "running", or blocked outside a system call
    name = _NAMES.get(machine, {}).get(int(words[0]))
    *arguments, stack, _ = (int(word, 16) for word in words[1:])
    if name is None or stack < _LOWEST_STACK_OF_64_BITS:
        return UNKNOWN
    if name == "futex":
        return _futex(arguments)
    if name == "clock_nanosleep":
        return _clock_nanosleep(arguments, read_memory)
    if name in ("accept", "accept4"):
        return Wait(kind=WaitKind.accept, call=name)
    if name == "wait4":
        return Wait(kind=WaitKind.child, call=name, child=max(0, _signed(arguments[0])))
    if name == "waitid":
        child = _signed(arguments[1]) if arguments[0] & 0xFFFFFFFF == _P_PID else 0
        return Wait(kind=WaitKind.child, call=name, child=max(0, child))
    milliseconds = _signed(arguments[2 if name == "poll" else 3])
    if milliseconds < 0:
        return Wait(kind=WaitKind.descriptors, call=name)
    return Wait(kind=WaitKind.timed, call=name, timeout_seconds=milliseconds / 1e3)


def _futex(arguments: list[int]) -> Wait:
    operation = arguments[1] & 0xFFFFFFFF
    command = operation & ~(_FUTEX_PRIVATE | _FUTEX_CLOCK_REALTIME)
    if command not in (_FUTEX_WAIT, _FUTEX_WAIT_BITSET):
        return UNKNOWN
    if arguments[3]:
        return Wait(kind=WaitKind.timed, call="futex", timeout_seconds=math.nan)
    # any process that maps the memory of a shared futex can wake its waiters
    return Wait(kind=WaitKind.futex, call="futex") if operation & _FUTEX_PRIVATE else UNKNOWN


def _clock_nanosleep(arguments: list[int], read_memory: ReadMemory) -> Wait:
    clock, flags, request = arguments[0] & 0xFFFFFFFF, arguments[1] & 0xFFFFFFFF, arguments[2]
    raw = read_memory(request, _TIMESPEC.size)
    # a relative sleep does not show when it began, and the wall clock may be set
    if clock != _CLOCK_MONOTONIC or not flags & _TIMER_ABSTIME or raw is None:
        return UNKNOWN
    seconds, nanoseconds = _TIMESPEC.unpack(raw)
    return Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=seconds + nanoseconds / 1e9)


def _signed(argument: int) -> int:
    """The lower 32 bits of an argument as a C `int`."""
    value = argument & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
