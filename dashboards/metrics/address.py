"""Parse `host:port`, open a listening socket on the first free port at or above it, and check Host headers.

Called by `server.py` and by the command line, which opens the socket before it creates anything on disk. The
socket listens at once, because with `SO_REUSEADDR` two sockets can be bound to one port; only listening
reserves it. Serves nothing.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass

from grpo_run.runtime.errors import UsageError

DEFAULT_ADDRESS = "127.0.0.1:9460"
PORTS_TRIED = 100
BACKLOG = 512
"""Connections that wait to be accepted; with fewer, a burst of others delays a scrape by a second."""

_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/]+)):(\d{1,5})", re.ASCII)
_HOST_HEADER = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::\d+)?")


@dataclass(frozen=True, kw_only=True)
class Listener:
    """A listening socket, and the host of the address that the user gave for it."""

    socket: socket.socket
    host: str

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that the socket is bound to."""
        host, port = self.socket.getsockname()[:2]
        return str(host), int(port)

    @property
    def target(self) -> str:
        """The address as a scraper is given it: the name of this machine if the socket has all addresses."""
        host, port = self.address
        try:
            unspecified = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            unspecified = False
        name = socket.gethostname() if unspecified else host
        return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"

    @property
    def open_to_network(self) -> bool:
        """Whether other machines can connect."""
        return not is_loopback(self.host)

    def accepts_host(self, header: str) -> bool:
        """Return whether a Host header names this server: by address, as `localhost`, or by the machine's
        name.

        A browser sends the name that it has resolved. A name that a foreign site resolves to this address
        (DNS rebinding) is none of these. The machine's own names count only if the server is open to the
        network.
        """
        match = _HOST_HEADER.fullmatch(header.strip())
        if match is None:
            return False
        name = (match[1] or match[2] or "").rstrip(".").lower()
        try:
            ipaddress.ip_address(name.partition("%")[0])
        except ValueError:
            names = {"localhost", self.host.lower()}
            if self.open_to_network:
                own = socket.gethostname().lower()
                names |= {own, own.partition(".")[0], socket.getfqdn().lower()}
            return name in names
        return True


def open_listener(address: str, option: str = "--metrics-addr", *, exactly: bool = False) -> Listener:
    """Return a listening socket on the first free port from the one of `host:port` on; port 0 is any free
    port.

    Args:
        option: that has the address, for messages.
        exactly: use no other port than the given one.

    Raises:
        UsageError: the address is malformed, is not an address of this machine, the port is not permitted, or
            all 100 ports are in use.
    """
    host, port = parse_address(address, option)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise UsageError(
            f"{option}: cannot serve at {host!r}: {error.strerror}; use an address of this machine"
        ) from error
    last = port if port == 0 else min(65535, port + (1 if exactly else PORTS_TRIED) - 1)
    for candidate in range(port, last + 1):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            # Allows a port with connections in TIME_WAIT, but not a port on which another socket listens.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((resolved[0], candidate, *resolved[2:]))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"{option}: cannot serve at {host}:{candidate}: {error.strerror}; use another address"
                ) from error
            continue
        return Listener(socket=sock, host=host)
    taken = f"port {port} of {host} is" if exactly else f"ports {port} to {last} of {host} are all"
    raise UsageError(f"{option}: {taken} in use; use another port, or 0 for any free one")


def parse_address(text: str, option: str = "--metrics-addr") -> tuple[str, int]:
    """Split `host:port` or `[ipv6]:port`; port 0 lets the kernel choose a port.

    Args:
        option: that has the address, for messages.

    Raises:
        UsageError: the text has neither form, or the port is above 65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match[3]) > 65535:
        raise UsageError(
            f"{option} {text!r} is not an address: use host:port with a port up to 65535, for example"
            " 127.0.0.1:9460, or [::1]:9460 for IPv6 (port 0: any free port)"
        )
    return match[1] or match[2], int(match[3])


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address. `localhost` is the only name that counts as one."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host == "localhost"
