"""Who holds the pipes and unix sockets that threads wait for, and the time limits set on sockets.

Holders come from /proc/PID/fd of every process, about 2 µs per open descriptor of the machine, so
`wait_detector.py` asks only for a rank that would be stuck if nobody else had them open. A device, a
network connection, an event descriptor or a named pipe leads elsewhere, and so does everything that cannot
be identified. A socket's timeout (`SO_RCVTIMEO`), which no system call shows, is read from a copy of the
descriptor; that requires the right to trace the process, and Linux 5.6. Does not judge.
"""

from __future__ import annotations

import ctypes
import os
import socket
import stat
import struct
from collections.abc import Iterable, Mapping

from grpo_run.watchdog.processes import list_processes, read_file, read_stat, unix_peers
from grpo_run.watchdog.waits.looks import Channels, RankLook, WaitingThread
from grpo_run.watchdog.waits.proof import threads_on_descriptors

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


_PIPE_ENDS = {stat.S_IRUSR: "read", stat.S_IWUSR: "write"}
_POLLING = frozenset({"poll", "ppoll", "select", "pselect6"})


def read_channels(look: RankLook) -> Channels:
    """Return the holders of what the rank's threads wait for."""
    wanted: dict[int, frozenset[str]] = {}
    pairs: dict[int, int] | None = None
    for pid, threads in threads_on_descriptors(look).items():
        for thread in threads:
            links = _links(pid, thread)
            if links and any(link.startswith("socket:") for link in links):
                pairs = _connected_pairs() if pairs is None else pairs
            ends = _both_ends(links, pairs or {}) if links else None
            if ends:
                wanted[thread.tid] = ends
    if not wanted:
        return Channels()
    holding = _holders(frozenset().union(*wanted.values()), look)
    if holding is None:
        return Channels()
    found = frozenset().union(*holding.values())
    # a thread waits only while both ends exist: an end that nobody holds is on its way through a unix socket
    return Channels(
        holders={
            tid: frozenset(pid for pid, held in holding.items() if held & ends)
            for tid, ends in wanted.items()
            if ends <= found
        }
    )


def _links(pid: int, thread: WaitingThread) -> list[str] | None:
    """What the thread's descriptors are; None if any of them cannot be told."""
    folder = f"/proc/{pid}/task/{thread.tid}"
    if thread.wait.through_epoll:
        return _members_of_epoll(folder, thread.wait.descriptors[0])
    links = [_read_link(f"{folder}/fd/{descriptor}") for descriptor in thread.wait.descriptors]
    # a time limit in the kernel ends a transfer, but not a poll
    on_socket = any(link is not None and link.startswith("socket:") for link in links)
    polls = thread.wait.call in _POLLING
    if on_socket and not polls and has_time_limit(pid, thread.wait.descriptors[0]) is not False:
        return None
    return None if None in links else [link for link in links if link is not None]


def _members_of_epoll(folder: str, descriptor: int) -> list[str] | None:
    """What an epoll instance watches.

    It keeps watching a descriptor that was closed while a copy was open: the inode then differs.
    """
    content = read_file(f"{folder}/fdinfo/{descriptor}")
    if content is None:
        return None
    links = []
    for line in content.splitlines():
        if not line.startswith(b"tfd:"):
            continue
        words = line.split()
        inode = next((word[4:] for word in words if word.startswith(b"ino:")), None)
        link = _read_link(f"{folder}/fd/{int(words[1])}")
        if inode is None or link is None or not link.endswith(f":[{int(inode, 16)}]"):
            return None
        links.append(link)
    return links


def _connected_pairs() -> dict[int, int]:
    """The peer of each unix socket to which only its peer can send; none if the kernel does not say."""
    try:
        return unix_peers({socket.SOCK_STREAM, socket.SOCK_SEQPACKET})
    except OSError:
        return {}


def _both_ends(links: Iterable[str], pairs: Mapping[int, int]) -> frozenset[str] | None:
    """The ends whose holders can end the wait; None if any descriptor is neither a pipe nor a connected pair.

    A socket's end is its inode. Both ends of a pipe have one inode, and differ in what they permit.
    """
    ends: set[str] = set()
    for link in links:
        kind, _, inode = link.rstrip("]").partition(":[")
        if kind == "socket":
            peer = pairs.get(int(inode))
            if not peer or pairs.get(peer) != int(inode):
                return None
            ends |= {link, f"socket:[{peer}]"}
        elif kind == "pipe":
            ends |= {f"{link} {access}" for access in _PIPE_ENDS.values()}
        else:
            return None
    return frozenset(ends)


def _holders(ends: frozenset[str], look: RankLook) -> dict[int, frozenset[str]] | None:
    """Which processes hold which of these ends; None if a process that may hold one cannot be read."""
    rank = read_stat(look.pid)
    if rank is None:
        return None
    holding = {}
    for pid in list_processes():
        held = _held(pid, ends)
        if held is None:
            process = read_stat(pid)
            if process is None or process.kernel_thread:
                continue
            # a process that is older than the rank inherited nothing from it
            if pid in look.processes or process.started_ticks >= rank.started_ticks:
                return None
        elif held:
            holding[pid] = held
    return holding


def _held(pid: int, ends: frozenset[str]) -> frozenset[str] | None:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return None
    held: set[str] = set()
    for name in names:
        link = _read_link(f"{folder}/{name}")
        if link is not None and link.startswith("pipe:"):
            held |= {f"{link} {access}" for access in _accesses(f"{folder}/{name}")} & ends
        elif link in ends:
            held.add(link)
    return frozenset(held)


def _accesses(path: str) -> list[str]:
    """What an open descriptor permits: the permissions of its link in /proc say so."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return []
    return [access for bit, access in _PIPE_ENDS.items() if mode & bit]


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None
