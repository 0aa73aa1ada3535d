"""Connections of a rank's process tree to processes outside the job, from the kernel's socket tables
(sock_diag(7)).

The kernel knows the other end of every socket on this machine: a connection between two ranks, to a rank's
own helper or to the supervisor is inside the job; one to another machine or to any other process is outside.
It also counts the bytes of TCP connections, which /proc/PID/io does not. Called by the detector of hangs and
by `remaining.py`. The tables are read through a netlink socket, as `ss` does, in about 1 ms and without
privilege, for this process's network namespace. What cannot be read gives None, "unknown". Does not judge.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from grpo_run.watchdog.processes import read_state
from grpo_run.watchdog.text import join_words

DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel", "/dev/infiniband/")
"""Descriptors of devices that work without the CPU."""

_CONNECTED_STATES = 1 << 1 | 1 << 2  # established, SYN sent
_INFO = 2  # INET_DIAG_INFO
_BYTES_AT = 120  # tcpi_bytes_acked and tcpi_bytes_received in struct tcp_info, since Linux 4.1
_INET_REQUEST = struct.Struct("=BBBBI48s")


@dataclass(frozen=True, slots=True)
class TcpSocket:
    """One TCP connection: `ends` are the local and the remote address; `traffic_bytes` went in and out."""

    ends: tuple[bytes, bytes]
    traffic_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketTables:
    """The connected sockets of this network namespace by inode: TCP, and the peer's inode of Unix sockets."""

    tcp: Mapping[int, TcpSocket]
    unix_peers: Mapping[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Connections:
    """`outside`: the processes outside the job to which a connection is open, in words; "" for none.

    `traffic_bytes` of all TCP connections so far; `device`: a device is open.
    """

    outside: str
    traffic_bytes: int
    device: bool = False


def read_connections(
    trees: Mapping[int, Collection[int]], *, supervisor: Collection[int]
) -> dict[int, Connections | None]:
    """Return the connections of each process tree.

    Args:
        trees: processes by rank. All of them are inside the job.
        supervisor: further processes that are inside the job. What a rank has inherited from them is not its
            own.
    """
    tables = read_socket_tables()
    files = {rank: _open_files(members) for rank, members in trees.items()}
    inherited = _open_files(supervisor)
    if tables is None or inherited is None:
        return dict.fromkeys(trees)
    inside = set(inherited.sockets)
    for of_rank in files.values():
        if of_rank is not None:
            inside |= of_rank.sockets
    by_ends = {one.ends: inode for inode, one in tables.tcp.items()}
    found: dict[int, Connections | None] = {}
    for rank, of_rank in files.items():
        if of_rank is None:
            found[rank] = None
            continue
        outside: set[str] = set()
        traffic = 0
        for inode in of_rank.sockets - inherited.sockets:
            tcp = tables.tcp.get(inode)
            if tcp is not None:
                traffic += tcp.traffic_bytes
                if by_ends.get(tcp.ends[::-1]) not in inside:
                    outside.add(f"{ip_address(tcp.ends[1][:-2])}:{int.from_bytes(tcp.ends[1][-2:], 'big')}")
            elif tables.unix_peers.get(inode, inode) not in inside:
                outside.add("another process")
        found[rank] = Connections(
            outside=join_words(sorted(outside)), traffic_bytes=traffic, device=of_rank.device
        )
    return found


@dataclass(frozen=True, slots=True)
class _OpenFiles:
    sockets: frozenset[int]
    device: bool


def _open_files(pids: Collection[int]) -> _OpenFiles | None:
    """Sockets by inode, and whether a device is open; None if a running process may not be read."""
    sockets: set[int] = set()
    device = False
    for pid in pids:
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, ProcessLookupError):
            continue  # exited
        except OSError:
            if read_state(pid) == "Z":
                continue  # it has none, but only root may list them
            return None
        for name in names:
            try:
                target = os.readlink(f"{folder}/{name}")
            except OSError:
                continue  # closed since it was listed
            if target.startswith("socket:["):
                sockets.add(int(target[8:-1]))
            elif target.startswith(DEVICES):
                device = True
    return _OpenFiles(frozenset(sockets), device)


def read_socket_tables() -> SocketTables | None:
    """Return the connected sockets of this network namespace, or None where the kernel does not tell."""
    try:
        tcp: dict[int, TcpSocket] = {}
        for family in (socket.AF_INET, socket.AF_INET6):
            request = _INET_REQUEST.pack(
                family, socket.IPPROTO_TCP, 1 << (_INFO - 1), 0, _CONNECTED_STATES, bytes(48)
            )
            for message in _dump(request):
                tcp.update(_parse_tcp(message))
        peers = _unix_peers()
    except (OSError, struct.error):
        return None
    return SocketTables(tcp=tcp, unix_peers=peers)


def _parse_tcp(message: bytes) -> Iterator[tuple[int, TcpSocket]]:
    # struct inet_diag_msg: family, state, timer, retransmits, ports, addresses, …, inode
    family = message[0]
    ports = message[4:6], message[6:8]
    local, remote = _address(message[8:24], family), _address(message[24:40], family)
    (inode,) = struct.unpack_from("=I", message, 68)
    info = dict(_attributes(message, 72)).get(_INFO, b"")
    traffic = sum(struct.unpack_from("=QQ", info, _BYTES_AT)) if len(info) >= _BYTES_AT + 16 else 0
    yield inode, TcpSocket((local + ports[0], remote + ports[1]), traffic)


def _address(raw: bytes, family: int) -> bytes:
    """An address of 4 bytes for IPv4, also if an IPv6 socket uses it."""
    if family == socket.AF_INET:
        return raw[:4]
    return raw[12:] if raw[:12] == bytes(10) + b"\xff\xff" else raw


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


def _dump(request: bytes) -> Iterator[bytes]:
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


def _attributes(message: bytes, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the attributes (type, content) that begin at an offset of a message."""
    while at + _ATTRIBUTE.size <= len(message):
        size, kind = _ATTRIBUTE.unpack_from(message, at)
        if size < _ATTRIBUTE.size:
            return
        yield kind, message[at + _ATTRIBUTE.size : at + size]
        at += size + (-size & 3)


def _unix_peers() -> dict[int, int]:
    """Return the peer of each connected unix socket, by inode.

    Raises:
        OSError: the kernel refuses, or does not answer in full within the limits.
    """
    request = _UNIX_REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_PEER, 0, 0)
    peers = {}
    for message in _dump(request):
        if len(message) < _UNIX_ANSWER.size:
            continue
        _, _, _, _, inode, *_ = _UNIX_ANSWER.unpack_from(message)
        peer = dict(_attributes(message, _UNIX_ANSWER.size)).get(_PEER, b"")
        # 0 is one that nobody holds any more
        if len(peer) >= 4 and any(peer[:4]):
            peers[inode] = int.from_bytes(peer[:4], sys.byteorder)
    return peers
