"""Connections of real processes: what leads out of the job is told from what stays inside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from grpo_run.runtime.supervisor.detection import _activity as activity
from grpo_run.watchdog.run_processes import connections
from grpo_run.watchdog.run_processes.connections import Connections, read_connections, read_socket_tables

Start = Callable[[str], int]

CLIENT = (
    "import socket, time; s = socket.create_connection(('127.0.0.1', {port})); print(flush=True);"
    " time.sleep(60)"
)
UNIX_PAIR = "import socket, time; pair = socket.socketpair(); print(flush=True); time.sleep(60)"

pytestmark = pytest.mark.skipif(
    read_socket_tables() is None, reason="this kernel does not tell the ends of sockets"
)


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a program and wait until it has printed a line; kill it at the end."""
    started: list[subprocess.Popen[bytes]] = []

    def run(program: str) -> int:
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A server in this process."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def test_a_fresh_rank_is_a_child_of_the_supervisor_and_its_connections_are_its_own(
    start: Start, server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So may be a helper of a rank that has lost its parent. Only the supervisor and its forkserver pass on
    theirs.
    """
    client = start(CLIENT.format(port=server.getsockname()[1]))
    monkeypatch.setattr(
        os, "getpid", lambda: 2**22 + 1
    )  # this process is a stranger, whose child is the rank
    monkeypatch.setattr(activity.process_names, "forkserver_pid", lambda: None)
    monkeypatch.setattr(activity.processes, "read_file", lambda path: str(client).encode())
    found = activity._read_connections({0: [client]})[0]
    assert found is not None
    assert found.outside


def of(pid: int, supervisor: list[int], *others: int) -> Connections:
    """The connections of a rank, with other ranks and the supervisor."""
    trees = {0: [pid], **{number: [other] for number, other in enumerate(others, 1)}}
    found = read_connections(trees, supervisor=supervisor)[0]
    assert found is not None
    return found


def test_a_local_server_is_outside_unless_it_belongs_to_the_job(server: socket.socket, start: Start) -> None:
    """As a stranger, as another rank, and as the supervisor."""
    client = start(CLIENT.format(port=server.getsockname()[1]))
    accepted, _ = server.accept()
    stranger = start(UNIX_PAIR)
    with accepted:
        assert of(client, [stranger]).outside == f"127.0.0.1:{server.getsockname()[1]}"
        assert not of(client, [stranger], os.getpid()).outside
        assert not of(client, [os.getpid()]).outside


def test_the_bytes_of_a_connection_are_counted(server: socket.socket, start: Start) -> None:
    """/proc/PID/io does not contain them."""
    client = start(CLIENT.format(port=server.getsockname()[1]))
    accepted, _ = server.accept()
    with accepted:
        before = of(client, []).traffic_bytes
        accepted.sendall(b"x" * 5000)
        assert of(client, []).traffic_bytes >= before + 5000


def test_a_socket_pair_of_ones_own_is_inside(start: Start) -> None:
    """As every event loop has one."""
    assert not of(start(UNIX_PAIR), []).outside


def test_a_unix_socket_of_a_stranger_is_outside(tmp_path: object, start: Start) -> None:
    """For example of a sandbox service."""
    path = f"{tmp_path}/service.sock"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(path)
        listening.listen()
        client = start(
            f"import socket, time; s = socket.socket(socket.AF_UNIX); s.connect({path!r}); print(flush=True);"
            " time.sleep(60)"
        )
        accepted, _ = listening.accept()
        with accepted:
            assert of(client, []).outside
            assert not of(client, [os.getpid()]).outside


def test_a_child_that_nobody_has_waited_for_has_no_connections() -> None:
    """Only root may list the descriptors of such a child."""
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            ended = os.posix_spawn("/bin/true", ["true"], {})
            os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)
            alone = Connections(outside="", traffic_bytes=0)
            os._exit(read_connections({0: [ended]}, supervisor=[]) != {0: alone})
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0


def test_what_the_kernel_does_not_tell_is_unknown(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither inside nor outside."""
    monkeypatch.setattr(connections, "read_socket_tables", lambda: None)
    assert read_connections({0: [start(UNIX_PAIR)]}, supervisor=[]) == {0: None}
