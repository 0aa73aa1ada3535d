"""Kill a process before, after or half-way through the n-th system call that changes a file.

    trace = run_and_kill(work, Stop(number=7, mode="before"), below=(folder,))

The work runs in a fork that the calling process traces with ptrace(2), so calls by torch and Rust code count
too. Only calls on files below the given folders count, and `os.getppid()`, which work may call as a marker
where it changes no file.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import stat
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_ME, SYSCALL, SET_OPTIONS, GET_SYSCALL_INFO = 0, 24, 0x4200, 0x420E  # linux/ptrace.h
TRACE_SYSGOOD, EXIT_KILL = 1, 0x100000
ENTRY = 1
MARK = "getppid"
WRITES = frozenset({"write", "pwrite64", "writev", "copy_file_range", "sendfile"})
ON_DESCRIPTORS = frozenset({"ftruncate", "traceocate", "fsync", "fdatasync", "flock", "fchmod", *WRITES})
ON_PATHS = frozenset({"rename", "unlink", "rmdir", "mkdir", "chmod"})
AT_DIRECTORIES = frozenset({"renameat", "renameat2", "unlinkat", "mkdirat", "fchmodat"})
CHANGING_FLAGS = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_RDWR
NUMBERS = {
    "x86_64": {
        1: "write", 2: "open", 18: "pwrite64", 20: "writev", 40: "sendfile", 73: "flock", 74: "fsync",
        75: "fdatasync", 77: "ftruncate", 82: "rename", 83: "mkdir", 84: "rmdir", 87: "unlink", 90: "chmod",
        91: "fchmod", 110: MARK, 257: "openat", 258: "mkdirat", 263: "unlinkat", 264: "renameat",
        268: "fchmodat",
        285: "traceocate", 316: "renameat2", 326: "copy_file_range",
    },
    "aarch64": {
        32: "flock", 34: "mkdirat", 35: "unlinkat", 38: "renameat", 46: "ftruncate", 47: "traceocate",
        52: "fchmod",
        53: "fchmodat", 56: "openat", 64: "write", 66: "writev", 68: "pwrite64", 71: "sendfile", 82: "fsync",
        83: "fdatasync", 173: MARK, 276: "renameat2", 285: "copy_file_range",
    },
}  # fmt: skip
"""Numbers of the system calls that change files, by machine, from asm/unistd.h."""


class _Info(ctypes.Structure):
    """`struct ptrace_syscall_info` at entry; at exit, only the first word of the union is used."""

    _fields_ = (
        ("op", ctypes.c_uint8),
        ("pad", ctypes.c_uint8 * 3),
        ("arch", ctypes.c_uint32),
        ("instruction_pointer", ctypes.c_uint64),
        ("stack_pointer", ctypes.c_uint64),
        ("number", ctypes.c_uint64),
        ("arguments", ctypes.c_uint64 * 6),
        ("rest", ctypes.c_uint64 * 2),
    )


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Where to kill: at the `number`-th call, counted from 1.

    `mode` is "before", "after" or "half" (counts only writes).
    """

    number: int
    mode: str


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Result of a traced run.

    Attributes:
        at: the call at which it was killed; None if it completed.
        calls: all counted calls, in order.
    """

    at: str | None
    calls: tuple[str, ...]


def unsupported() -> str | None:
    """Return why processes cannot be traced here, or None."""
    if platform.machine() not in NUMBERS:
        return f"no system call numbers for {platform.machine()} in tests/support/syscalls.py"
    try:
        trace = run_and_kill(os.getppid, Stop(number=1, mode="before"), below=())
    except OSError as error:
        return f"ptrace(2) is not permitted: {error.strerror}"
    return (
        None if trace.at == MARK else "ptrace(2) does not report system calls; Linux 5.3 or later is required"
    )


def run_and_kill(
    work: Callable[[], object], stop: Stop, *, below: Sequence[Path], timeout_seconds: int = 60
) -> Trace:
    """Run `work` in a fork of this process and kill it where `stop` says.

    The calling process must have no other threads, because a fork does not inherit them.

    Raises:
        OSError: the fork cannot be traced.
        RuntimeError: the work failed by itself.
    """
    victim = os.fork()
    if victim == 0:
        _be_traced(work, timeout_seconds)
    os.waitpid(victim, 0)
    try:
        _ptrace(SET_OPTIONS, victim, 0, TRACE_SYSGOOD | EXIT_KILL)
        return _follow(victim, stop, tuple(os.path.realpath(folder) for folder in below))
    except OSError:
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        raise


def _be_traced(work: Callable[[], object], timeout_seconds: int) -> None:
    code = 1
    try:
        signal.alarm(timeout_seconds)
        _ptrace(TRACE_ME, 0, 0, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def _follow(victim: int, stop: Stop, below: tuple[str, ...]) -> Trace:
    calls: list[str] = []
    pending, info, deliver = None, _Info(), 0
    while True:
        _ptrace(SYSCALL, victim, 0, deliver)
        deliver = 0
        _, status = os.waitpid(victim, 0)
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if status != 0:
                raise RuntimeError(f"the traced process failed, wait status {status:#x}")
            return Trace(at=None, calls=tuple(calls))
        number = os.WSTOPSIG(status)
        if number != signal.SIGTRAP | 0x80:
            deliver = number
            continue
        _ptrace(GET_SYSCALL_INFO, victim, ctypes.sizeof(info), ctypes.addressof(info))
        if info.op == ENTRY:
            pending = _counted(victim, info, below)
            if pending is None or (stop.mode == "half" and pending.partition(" ")[0] not in WRITES):
                pending = None
                continue
            calls.append(pending)
            descriptor = info.arguments[0]
            if len(calls) == stop.number and stop.mode == "before":
                return _kill(victim, calls)
        elif pending is not None and len(calls) == stop.number:
            if stop.mode == "half":
                _truncate_to_half(victim, descriptor, ctypes.c_int64(info.number).value)
            return _kill(victim, calls)


def _kill(victim: int, calls: list[str]) -> Trace:
    os.kill(victim, signal.SIGKILL)
    os.waitpid(victim, 0)
    return Trace(at=calls[-1], calls=tuple(calls))


def _counted(victim: int, info: _Info, below: tuple[str, ...]) -> str | None:
    """Return a description of the call if it counts."""
    name = NUMBERS[platform.machine()].get(info.number)
    first, second, third = info.arguments[0], info.arguments[1], info.arguments[2]
    if name is None:
        return None
    if name == MARK:
        return MARK
    if name in ON_DESCRIPTORS:
        path = _descriptor(victim, first)
    elif name in ON_PATHS:
        path = _text(victim, first)
    elif name in AT_DIRECTORIES:
        path = _path_at(victim, first, second)
    else:
        path = _text(victim, first) if name == "open" else _path_at(victim, first, second)
        flags = second if name == "open" else third
        if not flags & CHANGING_FLAGS:
            return None
    return f"{name} {path}" if path.startswith(below) and below else None


def _path_at(victim: int, directory: int, address: int) -> str:
    path = _text(victim, address)
    if path.startswith("/") or ctypes.c_int32(directory & 0xFFFFFFFF).value < 0:
        return path
    return f"{_descriptor(victim, directory)}/{path}"


def _descriptor(victim: int, number: int) -> str:
    try:
        return os.readlink(f"/proc/{victim}/fd/{number & 0xFFFFFFFF}")
    except OSError:
        return ""


def _text(victim: int, address: int) -> str:
    with open(f"/proc/{victim}/mem", "rb", buffering=0) as memory:
        content = b""
        while b"\0" not in content and len(content) < 4096:
            # never across a page boundary: the next page may not be mapped
            content += os.pread(
                memory.fileno(), 4096 - (address + len(content)) % 4096, address + len(content)
            )
    return os.fsdecode(content.partition(b"\0")[0])


def _truncate_to_half(victim: int, descriptor: int, written: int) -> None:
    """Truncate a file to half of what was just appended, as if the kernel had stopped there."""
    path = f"/proc/{victim}/fd/{descriptor & 0xFFFFFFFF}"
    found = os.stat(path)
    if written > 0 and stat.S_ISREG(found.st_mode):
        os.truncate(path, max(0, found.st_size - (written + 1) // 2))


def _ptrace(request: int, pid: int, address: int, data: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(request, pid, address, data) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
