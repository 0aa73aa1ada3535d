"""Where a server listens: parses `host:port` and binds the first free port from there on.

Called by `server.py`. Binding also listens: between two sockets that are only bound the kernel does not
choose, so a port is ours only then. Serves nothing.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket

from grpo_run.runtime.errors import UsageError

PORTS_TRIED = 100
BACKLOG = 64

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):(\d{1,5})", re.ASCII)


def parse_address(text: str) -> tuple[str, int]:
    """Split `host:port` or `[ipv6]:port`; port 0 lets the kernel choose.

    Raises:
        UsageError: it is neither, or the port is above 65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise UsageError(
            f"{text!r} is not an address to serve metrics at; give host:port, as in 127.0.0.1:9460,"
            " or [::1]:9460 for IPv6 (port 0 takes any free one)"
        )
    return match[1] or match[2], int(match[3])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`; a name counts as loopback only when it is `localhost`."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at `host`, on `port` or the next free one of the 100 from there; 0 is any free one.

    Raises:
        UsageError: the host is not one of this machine's, the port is not allowed, or all 100 are taken.
    """
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(
            f"metrics cannot be served at {host!r}: {error.strerror}; give an address of this machine"
        ) from error
    last = port if port == 0 else min(65535, port + PORTS_TRIED - 1)
    for candidate in range(port, last + 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port whose last owner's connections linger in TIME_WAIT is free; a listening one is not.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((resolved[0], candidate, *resolved[2:]))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"metrics cannot be served at {host}:{candidate}: {error.strerror}; give another address"
                ) from error
            continue
        return sock
    raise UsageError(
        f"metrics cannot be served at {host}: ports {port} to {last} are all taken; give another port, or 0"
    )
