"""Facts about processes from /proc, and socket connections from the kernel's socket tables.

The only place that parses /proc/PID/stat. Reads state, parent, session, CPU time, I/O and wait channel of a
process, see proc(5), and lists the members of sessions. A rank leads its own session, so its `pid`
identifies the session as well. A process that has exited or may not be read gives None, "unknown": never an
exception and never a zero. Called by the hang detector at every poll (about 15 µs a process; psutil takes
1.5 to 5 times as long) and for the evidence.

The socket tables are read through a netlink socket (sock_diag(7), as `ss` does) in about 1 ms, without
privilege, for this process's network namespace. `watchdog/run_processes/connections.py` and the detectors
use them. Does not judge.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass

MAX_READ_BYTES = 64 * 1024
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")

# positions in /proc/PID/stat after the command name, which is in parentheses and may contain any character
_STATE, _PARENT, _SESSION, _FLAGS = 0, 1, 3, 6
_USER_TICKS, _SYSTEM_TICKS, _CHILD_USER_TICKS, _CHILD_SYSTEM_TICKS, _STARTED = 11, 12, 13, 14, 19
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD, linux/sched.h


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessStat:
    """One process, or one thread, as /proc/PID/stat shows it.

    `state` is one letter of proc(5); `cpu_seconds` its user and system time so far, and `children_cpu_seconds`
    that of children that have exited. A pid may be used again, so (`pid`, `started_ticks`) identifies a process.
    """

    pid: int
    name: str
    state: str
    parent: int
    session: int
    cpu_seconds: float
    children_cpu_seconds: float
    started_ticks: int
    kernel_thread: bool

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time."""
        return self.pid, self.started_ticks

    @property
    def is_alive(self) -> bool:
        """Whether it can still do anything: a zombie cannot."""
        return self.state not in ("Z", "X", "x")


@dataclass(frozen=True, kw_only=True, slots=True)
class MainThread:
    """A process's main thread: `state` is one letter of proc(5), `cpu_seconds` its user and system time."""

    state: str
    cpu_seconds: float


def read_stat(pid: int, thread: int | None = None) -> ProcessStat | None:
    """Return a process, with the CPU time of all its threads, or None.

    Args:
        pid: of the process.
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
        kernel_thread=bool(int(fields[_FLAGS]) & _KERNEL_THREAD),
    )


def read_main_thread(pid: int) -> MainThread | None:
    """Return state and CPU time of a process's main thread, or None."""
    stat = read_stat(pid, pid)
    return MainThread(state=stat.state, cpu_seconds=stat.cpu_seconds) if stat is not None else None


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


def list_processes() -> list[int]:
    """Return the ids of all processes that this one can see.

    Raises:
        OSError: /proc cannot be listed, for example because no file descriptor is left.
    """
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def members_by_session(sessions: Collection[int]) -> dict[int, list[int]]:
    """Return the processes of several sessions, with one scan of /proc (about 1 µs per process).

    Raises:
        OSError: /proc cannot be listed.
    """
    members: dict[int, list[int]] = {session: [] for session in sessions}
    for pid in list_processes():
        try:
            session = os.getsid(pid)
        except OSError:
            continue  # exited since it was listed, or asking is not permitted
        if session in members:
            members[session].append(pid)
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


TIMEOUT_SECONDS = 1.0
MAX_DUMP_BYTES = 32 * 2**20
"""Larger socket tables (some 100,000 connections) are not read."""

_SOCK_DIAG = 4  # linux/netlink.h: NETLINK_SOCK_DIAG
_BY_FAMILY = 20  # linux/sock_diag.h: SOCK_DIAG_BY_FAMILY
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ERROR, _DONE = 2, 3
_ALL_STATES = 0xFFFFFFFF
_PEER = 2  # linux/unix_diag.h: UNIX_DIAG_PEER
_SHOW_PEER = 4  # UDIAG_SHOW_PEER
_HEADER = struct.Struct("=IHHII")
_UNIX_REQUEST = struct.Struct("=BBHIIIII")
_UNIX_ANSWER = struct.Struct("=BBBBIII")  # struct unix_diag_msg: family, type, state, padding, inode, cookie
_ATTRIBUTE = struct.Struct("=HH")


def dump(request: bytes) -> Iterator[bytes]:
    """Yield the payloads of the messages that answer one request.

    Raises:
        OSError: the kernel refuses, or does not answer in full within the limits.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as link:
        link.settimeout(TIMEOUT_SECONDS)
        link.sendto(
            _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request, (0, 0)
        )
        received = 0
        while received < MAX_DUMP_BYTES:
            chunk = link.recv(1 << 17)
            received += len(chunk)
            at = 0
            while at + _HEADER.size <= len(chunk):
                size, kind, *_ = _HEADER.unpack_from(chunk, at)
                if kind == _DONE:
                    return
                if kind == _ERROR or size < _HEADER.size:
                    raise OSError("the kernel refused a socket dump")
                yield chunk[at + _HEADER.size : at + size]
                at += size + (-size & 3)
        raise OSError("the socket table is too large")


def attributes(message: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes (type, content) that begin at an offset of a message."""
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if size < _ATTRIBUTE.size:
            return
        yield kind, message[at + _ATTRIBUTE.size : at + size]
        at += size + (-size & 3)


def unix_peers(types: Collection[int] | None = None) -> dict[int, int]:
    """Return the peer of each connected unix socket, by inode.

    Args:
        types: only sockets of these types (`socket.SOCK_STREAM`).

    Raises:
        OSError: the kernel refuses, or does not answer in full within the limits.
    """
    request = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_PEER, 0, 0)
    peers = {}
    for message in dump(request):
        if len(message) < _UNIX_ANSWER.size:
            continue
        _, type_, _, _, inode, *_ = _UNIX_ANSWER.unpack_from(message)
        peer = dict(attributes(message, _UNIX_ANSWER.size)).get(_PEER, b"")
        # 0 is one that nobody holds any more
        if len(peer) >= 4 and any(peer[:4]) and (types is None or type_ in types):
            peers[inode] = int.from_bytes(peer[:4], sys.byteorder)
    return peers
