"""Addresses are parsed strictly, and a taken port is passed over."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from grpo_run.dashboards.metrics import address
from grpo_run.dashboards.metrics.address import is_loopback, listen, parse_address
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
    """The forms that are meant."""
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "9460", ":9460", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536", "::1:9460", "a b:1",
     "http://127.0.0.1:9460", "127.0.0.1:-1", "127.0.0.1:9460/metrics", "127.0.0.1:٣"],
)  # fmt: skip
def test_malformed_address_is_one_clear_line(text: str) -> None:
    """The message repeats what was given and shows what is meant."""
    with pytest.raises(UsageError) as error:
        parse_address(text)
    message = str(error.value)
    assert repr(text) in message
    assert "127.0.0.1:9460" in message
    assert "\n" not in message


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody listens, with room for a hundred above it."""
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


def test_taken_port_is_passed_over(taken: int) -> None:
    """The next free port is bound, close above."""
    with listen("127.0.0.1", taken) as sock:
        assert taken < sock.getsockname()[1] < taken + address.PORTS_TRIED


def test_no_free_port_is_a_usage_error(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the last try the message names the ports and the way out."""
    monkeypatch.setattr(address, "PORTS_TRIED", 1)
    with pytest.raises(UsageError, match=f"ports {taken} to {taken} are all taken; give another port, or 0"):
        listen("127.0.0.1", taken)


def test_port_range_ends_at_the_last_port() -> None:
    """A search that begins near the end does not run past 65535."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 65535))
        sock.listen()
        with pytest.raises(UsageError, match="ports 65535 to 65535 are all taken"):
            listen("127.0.0.1", 65535)


def test_address_of_another_machine_is_a_usage_error() -> None:
    """TEST-NET-1 (RFC 5737) is nobody's address."""
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        listen("192.0.2.1", 0)


def test_listening_socket_is_not_inherited() -> None:
    """A rank started later must not keep the port open."""
    with listen("127.0.0.1", 0) as sock:
        assert not sock.get_inheritable()


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("node-3", False)],
)  # fmt: skip
def test_only_loopback_counts_as_loopback(host: str, expected: bool) -> None:
    """Everything else may be reached from outside."""
    assert is_loopback(host) is expected
