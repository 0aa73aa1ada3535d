"""Which processes hold the other end of a process's pipes, unix sockets and TCP connections.

A descriptor is named by its link in /proc/PID/fd, for example `pipe:[4711]`. Both ends of a pipe have one
name; the peer of a unix socket is asked of the kernel (sock_diag(7)), and that of a TCP connection within the
machine is found in /proc/net/tcp. Used by `remaining.py` for processes that do not exit. Sends nothing on the
connections it reads about; judges nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from grpo_run.watchdog.processes import unix_peers

MAX_TABLE_BYTES = 8 * 1024 * 1024
"""Part of /proc/net/tcp that is read: about 50,000 connections."""
_ESTABLISHED = "01"


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherEnds:
    """What is at the other end of some descriptors.

    Args:
        links: descriptors at the other end; a process that holds one of them is a peer.
        remote: whether a TCP connection leads to another machine.
        unknown: whether the kernel does not say what some unix sockets are connected to.
    """

    links: frozenset[str]
    remote: bool
    unknown: bool


def open_links(pid: int) -> frozenset[str]:
    """Return the pipes and sockets that a process holds; none if it may not be read."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return frozenset()
    found = set()
    for name in names:
        try:
            link = os.readlink(f"{folder}/{name}")
        except OSError:
            continue  # closed meanwhile
        if link.startswith(("pipe:", "socket:")):
            found.add(link)
    return frozenset(found)


def other_ends(links: Collection[str], pid: int) -> OtherEnds:
    """Return what is connected to these descriptors.

    Args:
        links: pipes and sockets that the processes of interest hold.
        pid: one of these processes, whose network namespace counts.
    """
    sockets = {int(link[8:-1]): link for link in links if link.startswith("socket:")}
    ends = {link for link in links if link.startswith("pipe:")}
    try:
        unix: dict[int, int] | None = unix_peers()
    except OSError:
        unix = None  # not permitted, or not supported by this kernel
    ends |= {f"socket:[{peer}]" for own, peer in (unix or {}).items() if own in sockets}
    remote = False
    connections = _tcp_connections(pid)
    inode_of = {(local, far): inode for local, far, inode in connections}
    for local, far, inode in connections:
        if inode not in sockets:
            continue
        peer = inode_of.get((far, local))
        if peer:
            ends.add(f"socket:[{peer}]")
        elif not ip_address(far.rpartition(":")[0]).is_loopback:
            remote = True
    return OtherEnds(links=frozenset(ends), remote=remote, unknown=unix is None and bool(sockets))


def holders(links: Collection[str], among: Iterable[int]) -> list[int]:
    """Return which of these processes hold one of the descriptors."""
    wanted = frozenset(links)
    return [pid for pid in among if wanted & open_links(pid)]


def _tcp_connections(pid: int) -> list[tuple[str, str, int]]:
    """Return the established TCP connections of a process's network namespace: local, remote, inode."""
    found = []
    for name in ("tcp", "tcp6"):
        try:
            with open(f"/proc/{pid}/net/{name}", encoding="ascii") as file:
                lines = file.read(MAX_TABLE_BYTES).splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _ESTABLISHED:
                found.append((_endpoint(fields[1]), _endpoint(fields[2]), int(fields[9])))
    return found


def _endpoint(text: str) -> str:
    """Return `address:port` of an entry, whose address is in the machine's byte order, in hexadecimal."""
    address, _, port = text.partition(":")
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    packed = b"".join(words)
    if len(packed) == 16 and packed[:12] == bytes(10) + b"\xff\xff":  # an IPv4 connection of an IPv6 socket
        packed = packed[12:]
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return f"{socket.inet_ntop(family, packed)}:{int(port, 16)}"
