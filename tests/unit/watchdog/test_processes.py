"""Process facts from /proc and psutil: this process, missing processes, and unusual names."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from grpo_run.watchdog import processes

ME = os.getpid()
MISSING_PID = 2**22 + 1
"""Above the kernel's largest pid."""


def test_this_process_is_running() -> None:
    """It has used CPU time."""
    thread = processes.read_main_thread(ME)
    assert thread is not None
    assert thread.state == processes.read_state(ME) == "R"
    assert 0 < thread.cpu_seconds < 100_000


def test_cpu_seconds_are_the_main_threads() -> None:
    """They agree with the kernel's thread clock."""
    while time.thread_time() < 0.05:
        pass
    thread = processes.read_main_thread(ME)
    assert thread is not None
    assert thread.cpu_seconds == pytest.approx(time.thread_time(), abs=0.1)


def test_a_process_that_is_gone_is_unknown() -> None:
    """Every reading is None, never zero."""
    assert processes.read_state(MISSING_PID) is None
    assert processes.read_main_thread(MISSING_PID) is None
    assert processes.read_wchan(MISSING_PID) is None
    assert processes.read_io_bytes(MISSING_PID) is None
    assert processes.read_session(MISSING_PID) is None
    assert processes.session_members(MISSING_PID) == []


def test_this_process_is_a_member_of_its_session() -> None:
    """One scan serves several sessions; the usage is at least this process's own."""
    session = os.getsid(0)
    found = processes.members_by_session([session, MISSING_PID])
    assert ME in found[session]
    assert found[MISSING_PID] == []
    usage = processes.read_session(session)
    own = processes.read_main_thread(ME)
    assert usage is not None
    assert own is not None
    assert ME in usage.members
    assert usage.cpu_seconds >= own.cpu_seconds
    assert usage.io_bytes is None or usage.io_bytes > 0


def test_io_that_may_not_be_read_makes_the_sum_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A partial sum would look complete."""
    monkeypatch.setattr(processes, "read_io_bytes", lambda pid: None if pid == ME else 5)
    usage = processes.read_session(os.getsid(0))
    assert usage is not None
    assert usage.io_bytes is None


def test_a_name_with_parentheses_does_not_shift_the_fields() -> None:
    """A command may be called `) R 1 (`."""
    file = Path(f"/proc/self/task/{ME}/comm")
    before = file.read_text()
    file.write_text(") Z 1 2 (")
    try:
        assert processes.read_state(ME) == "R"
        assert ME in processes.session_members(os.getsid(0))
    finally:
        file.write_text(before.strip())


def test_a_file_that_may_not_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused access raises no exception."""

    def refuse(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert processes.read_wchan(ME) is None
    assert processes.read_io_bytes(ME) is None
    assert processes.read_state(ME) is None


NEAR = ["127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1"]
FAR = ["192.168.1.10", "10.0.0.127", "2001:db8::1", "::ffff:192.168.1.10"]
LEADER, CHILD = 7, 8
"""The processes of one session."""


def connection(remote: str, status: str = psutil.CONN_ESTABLISHED) -> SimpleNamespace:
    """A TCP connection as psutil reports it."""
    return SimpleNamespace(status=status, raddr=SimpleNamespace(ip=remote, port=443) if remote else ())


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[SimpleNamespace]]:
    """Connections by process of a session with two processes."""
    found: dict[int, list[SimpleNamespace]] = {LEADER: [], CHILD: []}

    def process(pid: int) -> SimpleNamespace:
        return SimpleNamespace(net_connections=lambda kind: found[pid])

    monkeypatch.setattr(psutil, "Process", process)
    monkeypatch.setattr(processes, "session_members", lambda pid: [LEADER, CHILD] if pid == LEADER else [])
    return found


@pytest.mark.parametrize("pid", [LEADER, CHILD])
@pytest.mark.parametrize("remote", FAR)
def test_a_connection_to_another_machine_is_found(
    connections: dict[int, list[SimpleNamespace]], remote: str, pid: int
) -> None:
    """In any process of the session, in either address family."""
    connections[LEADER].append(connection(NEAR[0]))
    connections[pid].append(connection(remote))
    assert processes.has_remote_connection(LEADER)


@pytest.mark.parametrize("remote", NEAR)
def test_a_loopback_connection_is_not_remote(
    connections: dict[int, list[SimpleNamespace]], remote: str
) -> None:
    """127.0.0.0/8 and ::1, also as an IPv4-mapped IPv6 address."""
    connections[LEADER].append(connection(remote))
    assert not processes.has_remote_connection(LEADER)


@pytest.mark.parametrize(
    "status", [psutil.CONN_SYN_SENT, psutil.CONN_TIME_WAIT, psutil.CONN_CLOSE_WAIT, psutil.CONN_LISTEN]
)
def test_a_connection_that_is_not_established_does_not_count(
    connections: dict[int, list[SimpleNamespace]], status: str
) -> None:
    """A connection being opened, closed or half closed, and a listener, which has no remote address."""
    connections[LEADER].append(connection("" if status == psutil.CONN_LISTEN else FAR[0], status))
    assert not processes.has_remote_connection(LEADER)


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(CHILD), psutil.AccessDenied(CHILD), OSError()])
def test_connections_that_cannot_be_read_count_as_none(
    connections: dict[int, list[SimpleNamespace]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """The other processes of the session are still read."""
    known = psutil.Process

    def process(pid: int) -> SimpleNamespace:
        if pid == LEADER:
            raise error
        return known(pid)  # type: ignore[return-value]

    monkeypatch.setattr(psutil, "Process", process)
    assert not processes.has_remote_connection(LEADER)
    connections[CHILD].append(connection(FAR[0]))
    assert processes.has_remote_connection(LEADER)


def test_a_process_that_is_gone_has_no_connection() -> None:
    """No session member is left to read."""
    assert not processes.has_remote_connection(MISSING_PID)


def test_a_loopback_connection_of_this_process_is_not_remote(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test opens a real connection, which psutil lists."""
    monkeypatch.setattr(processes, "session_members", lambda pid: [pid])
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        listed = [one.laddr for one in psutil.Process(ME).net_connections("tcp") if one.raddr]
        assert client.getsockname() in listed
        assert not processes.has_remote_connection(ME)
