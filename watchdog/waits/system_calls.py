"""What a thread waits for, decoded from the system call that it is in.

The kernel shows the call in /proc/PID/task/TID/syscall: number, six arguments, stack pointer and program
counter, or `running`. Time limits and lists of descriptors are in the thread's memory, which the caller
reads. Numbers are those of x86-64 and AArch64; any other machine, a call without an entry here, and memory
that cannot be read give an unknown wait. Pure.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass

from grpo_run.watchdog.waits.looks import UNKNOWN, Wait, WaitKind

ReadMemory = Callable[[int, int], "bytes | None"]
"""Reads (address, size in bytes) of the thread's memory; None if that is refused."""

MAX_DESCRIPTORS = 1024
"""A thread that polls more descriptors than this is not examined."""

_NUMBERS = {
    "x86_64": {
        "read": 0, "write": 1, "poll": 7, "readv": 19, "writev": 20, "select": 23, "nanosleep": 35,
        "accept": 43,
        "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "wait4": 61, "futex": 202,
        "clock_nanosleep": 230, "epoll_wait": 232, "waitid": 247, "pselect6": 270, "ppoll": 271,
        "epoll_pwait": 281, "accept4": 288, "epoll_pwait2": 441,
    },
    "aarch64": {
        "epoll_pwait": 22, "read": 63, "write": 64, "readv": 65, "writev": 66, "pselect6": 72, "ppoll": 73,
        "waitid": 95, "futex": 98, "nanosleep": 101, "clock_nanosleep": 115, "accept": 202, "sendto": 206,
        "recvfrom": 207, "sendmsg": 211, "recvmsg": 212, "accept4": 242, "wait4": 260, "epoll_pwait2": 441,
    },
}  # fmt: skip
"""Numbers of the system calls that can be judged, from the kernel's tables (asm/unistd.h)."""

_NAMES = {
    machine: {number: name for name, number in numbers.items()} for machine, numbers in _NUMBERS.items()
}
_TRANSFERS = frozenset({"read", "readv", "recvfrom", "recvmsg", "write", "writev", "sendto", "sendmsg"})

_FUTEX_WAIT, _FUTEX_WAIT_BITSET = 0, 9
_FUTEX_PRIVATE, _FUTEX_CLOCK_REALTIME = 128, 256
_CLOCK_MONOTONIC, _TIMER_ABSTIME = 1, 1
_P_PID = 1
_LOWEST_STACK_OF_64_BITS = 1 << 32

_POLLFD = struct.Struct("<ihh")
_TIMESPEC = struct.Struct("<qq")


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemCall:
    """A system call that a thread is blocked in, with its six arguments as unsigned 64-bit numbers."""

    name: str
    arguments: tuple[int, ...]


def parse_system_call(text: str, machine: str) -> SystemCall | None:
    """Return the call of one line of /proc/PID/task/TID/syscall; None if the thread runs or the call is
    unknown.

    A process of 32 bits has other numbers; it is recognized by its stack pointer.

    Args:
        text: the line.
        machine: `platform.machine()`.
    """
    words = text.split()
    if len(words) != 9:
        return None  # "running", or blocked outside a system call
    name = _NAMES.get(machine, {}).get(int(words[0]))
    *arguments, stack, _ = (int(word, 16) for word in words[1:])
    if name is None or stack < _LOWEST_STACK_OF_64_BITS:
        return None
    return SystemCall(name=name, arguments=tuple(arguments))


def decode_wait(call: SystemCall, read_memory: ReadMemory) -> Wait:
    """Return what a thread in this call waits for."""
    name, arguments = call.name, call.arguments
    if name == "futex":
        return _futex(arguments)
    if name == "clock_nanosleep":
        return _clock_nanosleep(arguments, read_memory)
    if name == "nanosleep":
        return Wait(kind=WaitKind.timed, call=name, timeout_seconds=math.nan)
    if name in ("poll", "ppoll"):
        return _poll(call, read_memory)
    if name in ("select", "pselect6"):
        return _select(call, read_memory)
    if name.startswith("epoll"):
        timeout = _timeout_pointer(arguments[3]) if name == "epoll_pwait2" else _milliseconds(arguments[3])
        return _on_descriptors(name, (_signed(arguments[0]),), timeout, through_epoll=True)
    if name in _TRANSFERS:
        return _on_descriptors(name, (_signed(arguments[0]),), math.inf)
    if name in ("accept", "accept4"):
        return Wait(kind=WaitKind.accept, call=name)
    if name == "wait4":
        return Wait(kind=WaitKind.child, call=name, child=max(0, _signed(arguments[0])))
    assert name == "waitid", name
    child = _signed(arguments[1]) if arguments[0] & 0xFFFFFFFF == _P_PID else 0
    return Wait(kind=WaitKind.child, call=name, child=max(0, child))


def _futex(arguments: tuple[int, ...]) -> Wait:
    operation = arguments[1] & 0xFFFFFFFF
    command = operation & ~(_FUTEX_PRIVATE | _FUTEX_CLOCK_REALTIME)
    if command not in (_FUTEX_WAIT, _FUTEX_WAIT_BITSET):
        return UNKNOWN
    if arguments[3]:
        return Wait(kind=WaitKind.timed, call="futex", timeout_seconds=math.nan)
    # any process that maps the memory of a shared futex can wake its waiters
    return Wait(kind=WaitKind.futex, call="futex") if operation & _FUTEX_PRIVATE else UNKNOWN


def _clock_nanosleep(arguments: tuple[int, ...], read_memory: ReadMemory) -> Wait:
    clock, flags, request = arguments[0] & 0xFFFFFFFF, arguments[1] & 0xFFFFFFFF, arguments[2]
    raw = read_memory(request, _TIMESPEC.size)
    # a relative sleep does not show when it began, and the wall clock may be set
    if clock != _CLOCK_MONOTONIC or not flags & _TIMER_ABSTIME or raw is None:
        return Wait(kind=WaitKind.timed, call="clock_nanosleep", timeout_seconds=math.nan)
    seconds, nanoseconds = _TIMESPEC.unpack(raw)
    return Wait(kind=WaitKind.sleep, call="clock_nanosleep", until_seconds=seconds + nanoseconds / 1e9)


def _poll(call: SystemCall, read_memory: ReadMemory) -> Wait:
    address, count, limit = call.arguments[:3]
    timeout = _milliseconds(limit) if call.name == "poll" else _timeout_pointer(limit)
    if count > MAX_DESCRIPTORS:
        return UNKNOWN
    raw = read_memory(address, count * _POLLFD.size) if count else b""
    if raw is None:
        return UNKNOWN
    descriptors = tuple(descriptor for descriptor, _, _ in _POLLFD.iter_unpack(raw) if descriptor >= 0)
    return _on_descriptors(call.name, descriptors, timeout)


def _select(call: SystemCall, read_memory: ReadMemory) -> Wait:
    count, *sets, limit = call.arguments[:5]
    timeout = _timeout_pointer(limit)
    if count > MAX_DESCRIPTORS:
        return UNKNOWN
    found: set[int] = set()
    for address in sets:
        raw = read_memory(address, (count + 63) // 64 * 8) if address and count else b""
        if raw is None:
            return UNKNOWN
        bits = int.from_bytes(raw, "little")
        found |= {descriptor for descriptor in range(count) if bits >> descriptor & 1}
    return _on_descriptors(call.name, tuple(sorted(found)), timeout)


def _on_descriptors(
    name: str, descriptors: tuple[int, ...], timeout_seconds: float, *, through_epoll: bool = False
) -> Wait:
    if timeout_seconds != math.inf:
        return Wait(kind=WaitKind.timed, call=name, timeout_seconds=timeout_seconds)
    if not descriptors:
        return UNKNOWN  # waits for a signal
    return Wait(kind=WaitKind.descriptors, call=name, descriptors=descriptors, through_epoll=through_epoll)


def _milliseconds(argument: int) -> float:
    milliseconds = _signed(argument)
    return math.inf if milliseconds < 0 else milliseconds / 1e3


def _timeout_pointer(address: int) -> float:
    return math.nan if address else math.inf


def _signed(argument: int) -> int:
    """The lower 32 bits of an argument as a C `int`."""
    value = argument & 0xFFFFFFFF
    return value - (1 << 32) if value >> 31 else value
