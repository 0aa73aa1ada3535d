"""What /proc tells of a process: its state, the CPU time of its main thread, its whole session's CPU and I/O.

Called by the watch about ten times a second (state and CPU of one pid cost some 15 µs) and by `collection.py`. See
proc(5) for the files. A rank leads a session of its own, so `pid` names the session as well. What is gone or may
not be read is None, "unknown": never an exception, and never a zero. Does not judge what a state means.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass

MAX_READ_BYTES = 64 * 1024
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# places in /proc/PID/stat after the command's name, which is in parentheses and may hold anything
_STATE, _SESSION, _USER_TICKS, _SYSTEM_TICKS = 0, 3, 11, 12


@dataclass(frozen=True, kw_only=True, slots=True)
class MainThread:
    """A process's main thread: `state` is one letter of proc(5), `cpu_seconds` its user and system time."""

    state: str
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionUsage:
    """What all processes of a session have used so far.

    `cpu_seconds` and `io_bytes` (characters read and written; not what `send` and `recv` carry) are sums over the living
    members, so they fall when a member ends. `io_bytes` is None when one member's could not be read.
    """

    members: tuple[int, ...]
    cpu_seconds: float
    io_bytes: int | None


def read_main_thread(pid: int) -> MainThread | None:
    """State and CPU time in one reading, or None."""
    fields = _stat_fields(f"/proc/{pid}/task/{pid}/stat")
    if fields is None:
        return None
    return MainThread(state=fields[_STATE].decode(), cpu_seconds=_cpu_seconds(fields))


def read_state(pid: int) -> str | None:
    """The main thread's state: `R`, `S`, `D` (uninterruptible), `T` (stopped), `t` (traced), `Z`, …; or None."""
    thread = read_main_thread(pid)
    return thread.state if thread is not None else None


def read_cpu_seconds(pid: int) -> float | None:
    """CPU seconds that the main thread has used, or None."""
    thread = read_main_thread(pid)
    return thread.cpu_seconds if thread is not None else None


def read_wchan(pid: int) -> str | None:
    """The kernel function the main thread sleeps in, "" when it does not sleep or the kernel hides it, or None."""
    content = read_file(f"/proc/{pid}/wchan")
    if content is None:
        return None
    name = content.decode(errors="replace").strip()
    return "" if name == "0" else name


def read_io_bytes(pid: int) -> int | None:
    """Bytes a process has read and written, page cache included, `send` and `recv` not (`rchar` + `wchar`), or None."""
    content = read_file(f"/proc/{pid}/io")
    if content is None:
        return None
    numbers = [line.split()[1] for line in content.splitlines() if line.startswith((b"rchar:", b"wchar:"))]
    return sum(map(int, numbers)) if len(numbers) == 2 else None


def read_session(pid: int, members_of: Collection[int] | None = None) -> SessionUsage | None:
    """CPU and I/O of every process in the session that `pid` leads; None when the session has no member left.

    Args:
        members_of: the session's processes, where `members_by_session` has told them already.
    """
    cpu_seconds, members = 0.0, []
    io_bytes: int | None = 0
    for member in session_members(pid) if members_of is None else members_of:
        fields = _stat_fields(f"/proc/{member}/stat")
        if fields is None:
            continue  # ended since it was listed
        members.append(member)
        cpu_seconds += _cpu_seconds(fields)
        its_bytes = read_io_bytes(member)
        io_bytes = None if io_bytes is None or its_bytes is None else io_bytes + its_bytes
    if not members:
        return None
    return SessionUsage(members=tuple(members), cpu_seconds=cpu_seconds, io_bytes=io_bytes)


def session_members(pid: int) -> list[int]:
    """All processes whose session is `pid`, by looking at every process of the machine (about 10 µs each)."""
    return members_by_session([pid])[pid]


def members_by_session(sessions: Collection[int]) -> dict[int, list[int]]:
    """The same for several sessions, at the price of one look around."""
    members: dict[int, list[int]] = {session: [] for session in sessions}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        fields = _stat_fields(f"/proc/{name}/stat")
        if fields is not None and (session := int(fields[_SESSION])) in members:
            members[session].append(int(name))
    return members


def connected_elsewhere(pid: int) -> bool:
    """Whether a process of the session that `pid` leads has a TCP connection to another machine.

    From /proc/PID/fd and /proc/PID/net/tcp: state 01 is ESTABLISHED. What cannot be read counts as none.
    """
    for member in session_members(pid):
        far = {inode for family in ("tcp", "tcp6") for inode in _far_sockets(f"/proc/{member}/net/{family}")}
        if far and not far.isdisjoint(_socket_inodes(member)):
            return True
    return False


def _far_sockets(path: str) -> list[str]:
    try:
        with open(path) as file:
            rows = [line.split() for line in list(file)[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if len(row) > 9 and row[3] == "01" and not _is_loopback(row[2])]


def _is_loopback(address: str) -> bool:
    """An address of /proc/net/tcp: 127.0.0.0/8 ends in 7F, ::1 in 01000000, words in host order (little-endian)."""
    host = address.partition(":")[0]
    if len(host) == 8:
        return host.endswith("7F")
    return host == "0" * 24 + "01000000" or (host.startswith("0" * 16 + "FFFF0000") and host.endswith("7F"))


def _socket_inodes(pid: int) -> set[str]:
    found: set[str] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return found
    for name in names:
        with contextlib.suppress(OSError):  # closed since it was listed
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    return found


def read_file(path: str) -> bytes | None:
    """A small file's first 64 KiB, or None when it is gone or may not be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(descriptor, MAX_READ_BYTES)
    except OSError:
        return None  # the process ended between the two calls (ESRCH), or its files are not ours to read
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
