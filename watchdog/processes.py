"""Facts about processes from /proc: of one process, and of all at one moment with their parents and sessions.

The only place that parses /proc/PID/stat. Reads state, parent, session, CPU time, I/O and wait channel of a
process, see proc(5). A process that has exited or may not be read gives None, "unknown": never an
exception and never a zero. Called by the hang detector at every poll (about 15 µs a process; psutil takes
1.5 to 5 times as long) and for the evidence. A helper that leaves its parent's session remains its child.
Does not judge.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_READ_BYTES = 64 * 1024
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# positions in /proc/PID/stat after the command name, which is in parentheses and may contain any character
_STATE, _PARENT, _SESSION = 0, 1, 3
_USER_TICKS, _SYSTEM_TICKS, _CHILD_USER_TICKS, _CHILD_SYSTEM_TICKS, _STARTED = 11, 12, 13, 14, 19


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """One process, or one thread, as /proc/PID/stat shows it.

    `state` is one letter of proc(5); `cpu_seconds` its user and system time so far, and
    `children_cpu_seconds` that of children that have exited. A pid may be used again, so (`pid`,
    `started_ticks`) identifies a process.
    """

    pid: int
    name: str
    state: str
    parent: int
    session: int
    cpu_seconds: float
    children_cpu_seconds: float
    started_ticks: int

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time."""
        return self.pid, self.started_ticks

    @property
    def is_alive(self) -> bool:
        """Whether it can still do anything: a zombie cannot."""
        return self.state not in ("Z", "X", "x")


def read_stat(pid: int, thread: int | None = None) -> ProcessStat | None:
    """Return a process, with the CPU time of all its threads, or None.

    Args:
        thread: id of one of its threads, which is returned instead, with its own state and CPU time.
    """
    content = read_file(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    if content is None:
        return None
    name_end = content.rfind(b")")
    fields = content[name_end + 2 :].split()
    if len(fields) <= _STARTED:
        return None
    return ProcessStat(
        pid=pid if thread is None else thread,
        name=content[content.find(b"(") + 1 : name_end].decode(errors="replace"),
        state=fields[_STATE].decode(),
        parent=int(fields[_PARENT]),
        session=int(fields[_SESSION]),
        cpu_seconds=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / TICKS_PER_SECOND,
        children_cpu_seconds=(int(fields[_CHILD_USER_TICKS]) + int(fields[_CHILD_SYSTEM_TICKS]))
        / TICKS_PER_SECOND,
        started_ticks=int(fields[_STARTED]),
    )


def read_main_thread(pid: int) -> ProcessStat | None:
    """Return a process's main thread, with its own state and CPU time, or None."""
    return read_stat(pid, pid)


def read_state(pid: int) -> str | None:
    """Return the main thread's state (`R`, `S`, `D` uninterruptible, `T` stopped, `t` traced, …), or None."""
    thread = read_main_thread(pid)
    return thread.state if thread is not None else None


def read_wchan(pid: int) -> str | None:
    """Return the kernel function that the main thread sleeps in; "" if none or hidden; None if unknown."""
    content = read_file(f"/proc/{pid}/wchan")
    if content is None:
        return None
    name = content.decode(errors="replace").strip()
    return "" if name == "0" else name


def read_io_bytes(pid: int) -> int | None:
    """Return the bytes read and written, with page cache and without sockets, and those that page faults have
    read, as of a mapped file on a slow disk; None if they are unknown.
    """
    content = read_file(f"/proc/{pid}/io")
    if content is None:
        return None
    names = (b"rchar:", b"wchar:", b"read_bytes:")
    numbers = [int(line.split()[1]) for line in content.splitlines() if line.startswith(names)]
    return sum(numbers) if len(numbers) == len(names) else None


def list_processes() -> list[int]:
    """Return the ids of all processes that this one can see.

    Raises:
        OSError: /proc cannot be listed, for example because no file descriptor is left.
    """
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read_file(path: str) -> bytes | None:
    """Return the first 64 KiB of a file, or None if it is gone or may not be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, MAX_READ_BYTES)
    except OSError:
        return None  # the process exited between the two calls (ESRCH), or reading is not permitted
    finally:
        os.close(descriptor)


def read_processes() -> dict[int, ProcessStat]:
    """Return all processes by pid (about 15 µs per process).

    Raises:
        OSError: /proc cannot be listed, for example because no file descriptor is left.
    """
    found = map(read_stat, list_processes())
    return {process.pid: process for process in found if process is not None}


def children_by_parent(processes: Mapping[int, ProcessStat]) -> dict[int, list[int]]:
    """Return the pids of the children of every process that has any."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    return children


def read_children(pid: int) -> list[int]:
    """Return the children that a process's main thread has started, or that it has adopted, zombies too."""
    content = read_file(f"/proc/{pid}/task/{pid}/children")
    if content is not None:
        return [int(number) for number in content.split()]
    # a kernel without CONFIG_PROC_CHILDREN, or there is no such process
    return children_by_parent(read_processes()).get(pid, [])


def descendants(processes: Mapping[int, ProcessStat], roots: Iterable[int]) -> set[int]:
    """Return the pids of `roots` that exist and of all their descendants, in any session."""
    children = children_by_parent(processes)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def read_arguments(pid: int) -> str:
    """Return the command line of a process; "" if it is unknown."""
    content = read_file(f"/proc/{pid}/cmdline") or b""
    return content.replace(b"\0", b" ").decode(errors="replace").strip()


MAX_ENVIRONMENT_BYTES = 1024 * 1024


def read_environment(pid: int) -> bytes:
    """Return the environment that a process's program was started with; empty if it may not be read.

    Only a program started by `exec` has an environment of its own in /proc; a fork shows that of its parent.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read(MAX_ENVIRONMENT_BYTES)
    except OSError:
        return b""
