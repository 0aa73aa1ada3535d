"""What /proc tells: of this process, of one that is not there, and of names that are made to confuse."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from grpo_run.watchdog import processes

ME = os.getpid()
NOBODY = 2**22 + 1
"""Above the kernel's largest pid."""


def test_this_process_runs() -> None:
    """Who reads its own state is running, and has used time."""
    thread = processes.read_main_thread(ME)
    assert thread is not None
    assert thread.state == processes.read_state(ME) == "R"
    assert 0 < thread.cpu_seconds < 100_000


def test_cpu_seconds_are_the_main_threads() -> None:
    """They agree with what the kernel tells this process about itself."""
    while time.thread_time() < 0.05:
        pass
    told = processes.read_cpu_seconds(ME)
    assert told is not None
    assert told == pytest.approx(time.thread_time(), abs=0.1)


def test_a_process_that_is_gone_is_unknown() -> None:
    """None from every reading, and never a zero."""
    assert processes.read_state(NOBODY) is None
    assert processes.read_cpu_seconds(NOBODY) is None
    assert processes.read_wchan(NOBODY) is None
    assert processes.read_io_bytes(NOBODY) is None
    assert processes.read_session(NOBODY) is None
    assert processes.session_members(NOBODY) == []


def test_the_session_of_this_process_has_it_as_member() -> None:
    """One look around serves several sessions; usage is at least this process's own."""
    session = os.getsid(0)
    found = processes.members_by_session([session, NOBODY])
    assert ME in found[session]
    assert found[NOBODY] == []
    usage = processes.read_session(session)
    own = processes.read_cpu_seconds(ME)
    assert usage is not None
    assert own is not None
    assert ME in usage.members
    assert usage.cpu_seconds >= own
    assert usage.io_bytes is None or usage.io_bytes > 0


def test_io_that_may_not_be_read_makes_the_sum_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part of a sum would look like the whole."""
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
    """Refusal is no exception."""

    def refuse(*arguments: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert processes.read_wchan(ME) is None
    assert processes.read_io_bytes(ME) is None
    assert processes.read_state(ME) is None


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
NEAR = ["0100007F:1F90", "0200007F:1F90", "0" * 24 + "01000000:1F90", "0" * 16 + "FFFF00000100007F:1F90"]
FAR = [
    "0A01A8C0:01BB",  # 192.168.1.10
    "7F00000A:01BB",  # 10.0.0.127
    "B80D0120000000000000000001000000:01BB",  # 2001:db8::1
    "0" * 16 + "FFFF00000A01A8C0:01BB",  # ::ffff:192.168.1.10
]


def row(remote: str, inode: int, state: str = "01") -> str:
    """A line of /proc/PID/net/tcp."""
    local = "0" * len(remote.partition(":")[0]) + ":A1B2"
    return f"   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  1000        0 {inode} 1 0 20\n"


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The text of every process's table of TCP connections; processes 7 and 8 are of session 7."""
    file = tmp_path / "tcp"
    real = processes._far_sockets
    monkeypatch.setattr(processes, "_far_sockets", lambda path: real(str(file)))
    monkeypatch.setattr(processes, "session_members", lambda pid: [7, 8] if pid == 7 else [])
    monkeypatch.setattr(processes, "_socket_inodes", lambda pid: {7: {"11"}, 8: {"22", "23"}}[pid])
    return file


@pytest.mark.parametrize("inode", [11, 23])
@pytest.mark.parametrize("remote", FAR)
def test_a_connection_to_another_machine_is_seen(table: Path, remote: str, inode: int) -> None:
    """Of any process of the session, in either family."""
    table.write_text(HEAD + row(NEAR[0], 11) + row(remote, inode))
    assert processes.connected_elsewhere(7)


@pytest.mark.parametrize("remote", NEAR)
def test_a_connection_within_the_machine_leads_nowhere(table: Path, remote: str) -> None:
    """127.0.0.0/8 and ::1, also written as one of the other family."""
    table.write_text(HEAD + row(remote, 11))
    assert not processes.connected_elsewhere(7)


@pytest.mark.parametrize("state", ["02", "06", "08", "0A"])
def test_a_connection_that_is_not_established_is_none(table: Path, state: str) -> None:
    """Being made, over, half closed, or a listener."""
    table.write_text(HEAD + row(FAR[0], 11, state))
    assert not processes.connected_elsewhere(7)


def test_another_sessions_connection_is_not_this_ones(table: Path) -> None:
    """The table lists those of everybody on the machine."""
    table.write_text(HEAD + row(FAR[0], 99))
    assert not processes.connected_elsewhere(7)


@pytest.mark.parametrize("text", [None, "", HEAD, HEAD + "   0: torn 0A01A8C0:01BB 01\n"])
def test_a_table_that_cannot_be_read_tells_of_none(table: Path, text: str | None) -> None:
    """Missing, empty, or cut short."""
    if text is not None:
        table.write_text(text)
    assert not processes.connected_elsewhere(7)


def test_a_process_that_is_gone_is_connected_to_nobody() -> None:
    """And has no sockets."""
    assert not processes.connected_elsewhere(NOBODY)
    assert processes._socket_inodes(NOBODY) == set()


def test_a_loopback_connection_of_this_process_is_not_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, found among the descriptors; the same table without the exception for loopback would tell of it."""
    monkeypatch.setattr(processes, "session_members", lambda pid: [pid])
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        inode = str(os.fstat(client.fileno()).st_ino)
        assert inode in processes._socket_inodes(ME)
        table = f"/proc/{ME}/net/tcp"
        assert inode not in processes._far_sockets(table)
        monkeypatch.setattr(processes, "_is_loopback", lambda address: False)
        assert inode in processes._far_sockets(table)
        assert processes.connected_elsewhere(ME)
