"""Connections of a rank's process tree to processes outside the job, from the kernel's socket tables
(sock_diag(7)).

The kernel knows the other end of every socket on this machine: a connection between two ranks, to a rank's
own helper or to the supervisor is inside the job; one to another machine or to any other process is outside.
It also counts the bytes of TCP connections, which /proc/PID/io does not. Called by the detector of hangs and
by `remaining.py`. What cannot be read gives None, "unknown". Does not judge.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from grpo_run.watchdog.processes import attributes, dump, unix_peers

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
    """`outside`: a connection to a process outside the job is open; `device`: a device is.

    `traffic_bytes` of all TCP connections so far.
    """

    outside: bool
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
        peers: list[int | None] = []
        traffic = 0
        for inode in of_rank.sockets - inherited.sockets:
            tcp = tables.tcp.get(inode)
            if tcp is not None:
                traffic += tcp.traffic_bytes
                peers.append(by_ends.get(tcp.ends[::-1]))
            elif inode in tables.unix_peers:
                peers.append(tables.unix_peers[inode])
        found[rank] = Connections(
            outside=any(peer not in inside for peer in peers), traffic_bytes=traffic, device=of_rank.device
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
            for message in dump(request):
                tcp.update(_parse_tcp(message))
        peers = unix_peers()
    except (OSError, struct.error):
        return None
    return SocketTables(tcp=tcp, unix_peers=peers)


def _parse_tcp(message: bytes) -> Iterator[tuple[int, TcpSocket]]:
    # struct inet_diag_msg: family, state, timer, retransmits, ports, addresses, …, inode
    family = message[0]
    ports = message[4:6], message[6:8]
    local, remote = _address(message[8:24], family), _address(message[24:40], family)
    (inode,) = struct.unpack_from("=I", message, 68)
    info = dict(attributes(message, 72)).get(_INFO, b"")
    traffic = sum(struct.unpack_from("=QQ", info, _BYTES_AT)) if len(info) >= _BYTES_AT + 16 else 0
    yield inode, TcpSocket((local + ports[0], remote + ports[1]), traffic)


def _address(raw: bytes, family: int) -> bytes:
    """An address of 4 bytes for IPv4, also if an IPv6 socket uses it."""
    if family == socket.AF_INET:
        return raw[:4]
    return raw[12:] if raw[:12] == bytes(10) + b"\xff\xff" else raw
