"""Unix sockets of other processes: pairs that are connected, and time limits set on a socket.

Pairs are asked of the kernel through a netlink socket (sock_diag(7), as `ss -x` does), without privilege and in
about 1 ms. A time limit is read from a copy of the descriptor, which requires the right to trace the process.
Called by `channels.py`. Does not judge.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

TIMEOUT_SECONDS = 0.5
"""Time limit for one answer; the kernel answers at once."""
MAX_ANSWERS = 10_000
"""Number of datagrams that are read; each describes dozens of sockets."""

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST_DUMP = 0x301
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UDIAG_SHOW_PEER = 4
_UNIX_DIAG_PEER = 2
_ALL_STATES = 0xFFFFFFFF

_PIDFD_GETFD = 438  # the same on all machines; Linux 5.6
_TIMEVAL = struct.Struct("=qq")
_libc = ctypes.CDLL(None, use_errno=True)

_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBHIIIII")  # family, protocol, 0, states, inode, show, cookie
_SOCKET = struct.Struct("=BBBBIII")  # family, type, state, 0, inode, cookie
_ATTRIBUTE = struct.Struct("=HH")  # length, type


def connected_pairs() -> dict[int, int] | None:
    """Return the peer's inode of each connected stream or packet socket; None if the kernel does not say.

    A datagram socket is absent, because any process may send to it.
    """
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as connection:
            connection.settimeout(TIMEOUT_SECONDS)
            body = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _UDIAG_SHOW_PEER, 0, 0)
            length = _HEADER.size + len(body)
            connection.send(_HEADER.pack(length, _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST_DUMP, 1, 0) + body)
            peers: dict[int, int] = {}
            for _ in range(MAX_ANSWERS):
                finished = _parse(connection.recv(65536), peers)
                if finished is not None:
                    return peers if finished else None
    except OSError:
        pass
    return None


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


def _parse(answer: bytes, peers: dict[int, int]) -> bool | None:
    """Add the sockets of one datagram to `peers`. Return whether the listing is complete; None for not yet."""
    at = 0
    while at + _HEADER.size <= len(answer):
        length, kind, *_ = _HEADER.unpack_from(answer, at)
        if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
            return bool(kind == _NLMSG_DONE)
        _, type_, _, _, inode, *_ = _SOCKET.unpack_from(answer, at + _HEADER.size)
        if type_ in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            attribute = at + _HEADER.size + _SOCKET.size
            while attribute + _ATTRIBUTE.size <= at + length:
                size, name = _ATTRIBUTE.unpack_from(answer, attribute)
                if name == _UNIX_DIAG_PEER:
                    peers[inode] = struct.unpack_from("=I", answer, attribute + _ATTRIBUTE.size)[0]
                attribute += max(4, (size + 3) & ~3)
        at += (length + 3) & ~3
    return None
