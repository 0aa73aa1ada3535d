"""What is at the other end of a process's TCP connections, by the kernel's tables."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.run_processes import peers

OWN = 100
"""Inode of the socket whose other end is asked for."""


def ends(monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, str, int]) -> peers.OtherEnds:
    """The other ends of one socket, if the kernel lists these connections and no unix sockets."""
    monkeypatch.setattr(peers, "_tcp_connections", lambda pid: list(rows))
    monkeypatch.setattr(peers, "unix_peers", dict)
    return peers.other_ends({f"socket:[{OWN}]"}, 1)


@pytest.mark.parametrize("far", ["192.168.1.10:443", "10.0.0.127:443", "2001:db8::1:443"])
def test_a_connection_that_only_this_end_lists_is_remote(monkeypatch: pytest.MonkeyPatch, far: str) -> None:
    """The other machine has the other end."""
    found = ends(monkeypatch, ("192.168.1.2:40000", far, OWN))
    assert (found.links, found.remote) == (frozenset(), True)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "192.168.1.2"])
def test_a_connection_within_the_machine_names_its_other_end(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """Also over an address that other machines can reach."""
    near, far = f"{host}:40000", f"{host}:9000"
    found = ends(monkeypatch, (near, far, OWN), (far, near, 200))
    assert (found.links, found.remote) == ({"socket:[200]"}, False)


def test_a_loopback_connection_without_other_end_is_not_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peer has exited."""
    found = ends(monkeypatch, ("127.0.0.1:40000", "127.0.0.1:9000", OWN))
    assert (found.links, found.remote) == (frozenset(), False)


def test_connections_of_others_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table is that of the whole machine."""
    found = ends(monkeypatch, ("192.168.1.2:40000", "192.168.1.10:443", OWN + 1))
    assert (found.links, found.remote) == (frozenset(), False)


def test_unix_sockets_that_the_kernel_does_not_explain_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something may be at their other end."""
    monkeypatch.setattr(peers, "_tcp_connections", lambda pid: [])

    def refuse() -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(peers, "unix_peers", refuse)
    assert peers.other_ends({f"socket:[{OWN}]"}, 1).unknown
    assert not peers.other_ends({"pipe:[1]"}, 1).unknown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0100007F:2328", "127.0.0.1:9000"),
        ("0000000000000000FFFF00000100007F:2328", "127.0.0.1:9000"),
        ("00000000000000000000000001000000:0050", "::1:80"),
        ("B80D0120000000000000000001000000:01BB", "2001:db8::1:443"),
    ],
)
def test_the_kernels_addresses_are_read(text: str, expected: str) -> None:
    """In the byte order of x86-64; an IPv4 connection of an IPv6 socket is one of IPv4."""
    assert peers._endpoint(text) == expected


def test_a_process_that_may_not_be_read_holds_nothing() -> None:
    """No exception: it may have exited."""
    assert peers.open_links(2**22 + 1) == frozenset()
