"""Facts about processes from /proc: state and CPU time of the main thread, CPU time and I/O of a session.

Called by the hang detector at every poll (state and CPU time of one process take about 15 µs) and for the
evidence; see proc(5) for the files. psutil takes 1.5 to 5 times as long for these. A rank leads its own session, so its `pid` identifies the session as well. A process that has exited or may not be read gives None, "unknown": never an exception and never a zero. Does not judge.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

MAX_READ_BYTES = 64 * 1024
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# positions in /proc/PID/stat after the command name, which is in parentheses and may contain any character
_STATE, _USER_TICKS, _SYSTEM_TICKS = 0, 11, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class MainThread:
    """A process's main thread: `state` is one letter of proc(5), `cpu_seconds` its user and system time."""

    state: str
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionUsage:
    """CPU time and I/O of all processes of a session so far.

    `cpu_seconds` and `io_bytes` (bytes read and written, without `send` and `recv`) are sums over the running
    members, so they decrease when a member exits. `io_bytes` is None if that of any member could not be read.
    """

    members: tuple[int, ...]
    cpu_seconds: float
    io_bytes: int | None


def read_main_thread(pid: int) -> MainThread | None:
    """Return state and CPU time of a process's main thread, or None."""
    fields = _stat_fields(f"/proc/{pid}/task/{pid}/stat")
    if fields is None:
        return None
    return MainThread(state=fields[_STATE].decode(), cpu_seconds=_cpu_seconds(fields))


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
    """Return the bytes read and written (`rchar` + `wchar`: with page cache, without sockets), or None."""
    content = read_file(f"/proc/{pid}/io")
    if content is None:
        return None
    numbers = [line.split()[1] for line in content.splitlines() if line.startswith((b"rchar:", b"wchar:"))]
    return sum(map(int, numbers)) if len(numbers) == 2 else None


def read_session(pid: int, members_of: Collection[int] | None = None) -> SessionUsage | None:
    """Return the usage of the session that `pid` leads, or None if the session has no process.

    Args:
        members_of: the session's processes, if `members_by_session` has listed them already.
    """
    cpu_seconds, members = 0.0, []
    io_bytes: int | None = 0
    for member in session_members(pid) if members_of is None else members_of:
        fields = _stat_fields(f"/proc/{member}/stat")
        if fields is None:
            continue  # exited since it was listed
        members.append(member)
        cpu_seconds += _cpu_seconds(fields)
        member_bytes = read_io_bytes(member)
        io_bytes = None if io_bytes is None or member_bytes is None else io_bytes + member_bytes
    if not members:
        return None
    return SessionUsage(members=tuple(members), cpu_seconds=cpu_seconds, io_bytes=io_bytes)


def session_members(pid: int) -> list[int]:
    """Return all processes of the session that `pid` leads. Scans all of /proc (about 1 µs per process)."""
    return members_by_session([pid])[pid]


def members_by_session(sessions: Collection[int]) -> dict[int, list[int]]:
    """Return the processes of several sessions, with one scan of /proc."""
    members: dict[int, list[int]] = {session: [] for session in sessions}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            session = os.getsid(int(name))
        except OSError:
            continue  # exited since it was listed, or asking is not permitted
        if session in members:
            members[session].append(int(name))
    return members


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


def _stat_fields(path: str) -> list[bytes] | None:
    content = read_file(path)
    if content is None:
        return None
    fields = content[content.rfind(b")") + 2 :].split()
    return fields if len(fields) > _SYSTEM_TICKS else None


def _cpu_seconds(fields: list[bytes]) -> float:
    return (int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / TICKS_PER_SECOND
