"""Addresses are parsed strictly, and a port in use is skipped."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from grpo_run.dashboards.metrics import address
from grpo_run.dashboards.metrics.address import is_loopback, open_listener, parse_address
from grpo_run.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:9460", "127.0.0.1", 9460),
        ("localhost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
        ("node-3.cluster:80", "node-3.cluster", 80),
    ],
)
def test_host_and_port_are_split(text: str, host: str, port: int) -> None:
    """The documented forms are accepted."""
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "9460", ":9460", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536", "::1:9460", "a b:1",
     "http://127.0.0.1:9460", "127.0.0.1:-1", "127.0.0.1:9460/metrics", "127.0.0.1:٣"],
)  # fmt: skip
def test_malformed_address_gives_a_one_line_error(text: str) -> None:
    """The error names the rejected text and shows a valid address, in one line."""
    with pytest.raises(UsageError) as error:
        parse_address(text)
    message = str(error.value)
    assert repr(text) in message
    assert "127.0.0.1:9460" in message
    assert "\n" not in message


def test_a_scraper_is_given_an_address_it_can_use() -> None:
    """The name of the machine for all addresses; brackets for IPv6."""
    for text, name in (
        ("127.0.0.1:0", "127.0.0.1"),
        ("[::1]:0", "[::1]"),
        ("0.0.0.0:0", socket.gethostname()),
    ):
        listener = open_listener(text)
        with listener.socket:
            assert listener.target == f"{name}:{listener.address[1]}"


@pytest.fixture
def used_port() -> Iterator[int]:
    """A port with a listening socket; at least one hundred port numbers lie above it."""
    with socket.socket() as sock:
        for port in range(20_000, 60_000, 101):
            try:
                sock.bind(("127.0.0.1", port))
            except OSError:
                continue
            sock.listen()
            yield port
            return
    pytest.fail("no free port from 20000 to 60000")


def test_port_in_use_is_skipped(used_port: int) -> None:
    """The next free port above it is used."""
    with open_listener(f"127.0.0.1:{used_port}").socket as sock:
        assert used_port < sock.getsockname()[1] < used_port + address.PORTS_TRIED


def test_an_address_that_must_be_used_exactly_is_refused_if_it_is_taken(used_port: int) -> None:
    """The error names the option, the ports tried and what to do."""
    expected = f"--address: port {used_port} of 127.0.0.1 is in use; use another port, or 0"
    with pytest.raises(UsageError, match=expected):
        address.open_listener(f"127.0.0.1:{used_port}", "--address", exactly=True)
    with pytest.raises(UsageError, match=r"--address .127\.0\.0\.1:80000. is not an address"):
        address.open_listener("127.0.0.1:80000", "--address")


def test_port_range_ends_at_the_last_port() -> None:
    """The search does not go beyond port 65535."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 65535))
        sock.listen()
        with pytest.raises(UsageError, match=r"ports 65535 to 65535 of 127\.0\.0\.1 are all in use"):
            open_listener("127.0.0.1:65535")


def test_address_of_another_machine_is_a_usage_error() -> None:
    """An address of TEST-NET-1 (RFC 5737), which no machine has, is rejected."""
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        open_listener("192.0.2.1:0")


def test_listening_socket_is_not_inherited() -> None:
    """A rank started later does not keep the port open."""
    with open_listener("127.0.0.1:0").socket as sock:
        assert not sock.get_inheritable()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("node-3", False)],
)  # fmt: skip
def test_only_loopback_counts_as_loopback(host: str, expected: bool) -> None:
    """Every other host may be reachable from the network."""
    assert is_loopback(host) is expected


def test_a_loopback_listener_answers_to_loopback_only() -> None:
    """Its own name in the network is one that another machine could have."""
    listener = open_listener("127.0.0.1:0")
    with listener.socket:
        assert not listener.open_to_network
        assert listener.accepts_host("localhost:1")
        assert listener.accepts_host("10.1.2.3")  # an address is no name that anyone could resolve to us
        assert not listener.accepts_host(f"not-{socket.gethostname()}.example")
        assert not listener.accepts_host("localhost.attacker.example")
        assert not listener.accepts_host("a:b:c")


def test_a_listener_open_to_the_network_answers_to_the_machines_name() -> None:
    """Prometheus addresses it by name."""
    listener = open_listener("0.0.0.0:0")
    with listener.socket:
        assert listener.open_to_network
        assert listener.accepts_host(f"{socket.gethostname()}:{listener.address[1]}")
        assert listener.accepts_host(socket.gethostname().upper() + ".")
        assert not listener.accepts_host("attacker.example")
