"""The kernel's socket tables, asked through a netlink socket (sock_diag(7), as `ss` does).

Needs no privilege and takes about 1 ms. Used for who is connected to whom: by `peers.py`, and by the detectors
of the runtime. Shows the sockets of this process's network namespace. Judges nothing.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Collection, Iterator

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
