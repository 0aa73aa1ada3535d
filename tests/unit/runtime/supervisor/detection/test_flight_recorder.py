"""Fetching Flight Recorders: every kind of answer, and none, under one deadline."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import SimpleNamespace

import pytest

from grpo_run.runtime.supervisor.detection import _collective_records as collective_records
from grpo_run.runtime.supervisor.detection._collective_records import MAX_ANSWER_BYTES, NoAnswer, fetch

OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"
PATIENT = 20.0
Serve = Callable[[Callable[[socket.socket], None]], str]


@pytest.fixture
def folder() -> Iterator[str]:
    """A folder whose path is short enough for sockets."""
    path = tempfile.mkdtemp(dir="/tmp", prefix="g")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def serve(folder: str) -> Iterator[Serve]:
    """Serves one connection in a thread, as the function given does; returns the socket's path."""
    threads: list[threading.Thread] = []
    listeners: list[socket.socket] = []

    def start(handle: Callable[[socket.socket], None]) -> str:
        path = f"{folder}/{len(listeners)}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen()
        listeners.append(listener)

        def run() -> None:
            # the client may have closed the connection
            with suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    handle(connection)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        return path

    yield start
    for listener in listeners:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def answering(*parts: bytes) -> Callable[[socket.socket], None]:
    """Reads the request, then answers in these parts and closes."""

    def handle(connection: socket.socket) -> None:
        asked = b""
        while b"\r\n\r\n" not in asked:
            asked += connection.recv(4096)
        assert asked.startswith(b"POST /handler/fr_trace_json HTTP/1.1\r\n")
        for part in parts:
            connection.sendall(part)

    return handle


def silent(connection: socket.socket) -> None:
    """Reads until the client gives up."""
    while connection.recv(4096):
        pass


def half(connection: socket.socket) -> None:
    """Answers without an end."""
    connection.sendall(OK + b'{"entries"')
    silent(connection)


def test_every_ranks_answer_is_fetched(serve: Serve) -> None:
    """Bodies by rank, without HTTP headers; from no rank, at once, none. A silent server, whose rank may be
    stopped, and an incomplete answer take until the deadline and do not affect other ranks.
    """
    paths = {rank: serve(answering(OK + b'{"rank": %d}' % rank)) for rank in (0, 3, 5)}
    expected = {rank: b'{"rank": %d}' % rank for rank in paths}
    assert fetch(paths, PATIENT) == (expected, {})
    assert fetch({}, PATIENT) == ({}, {})
    slow = {0: serve(silent), 1: serve(answering(OK + b"{}")), 2: serve(half)}
    late = "no answer within 0.05 s"
    assert fetch(slow, 0.05) == ({1: b"{}"}, {0: late, 2: late})


def test_an_answer_may_come_in_parts(serve: Serve) -> None:
    """Split anywhere, also inside the header; a body may contain an empty line."""
    parts = [OK[:7], OK[7:-1], OK[-1:] + b"{", b"\r\n\r\n", b"}" * 200_000]
    answers, failures = fetch({0: serve(answering(*parts))}, PATIENT)
    assert answers == {0: b"{\r\n\r\n" + b"}" * 200_000}
    assert failures == {}


def test_an_answer_above_the_limit_is_a_failure(serve: Serve) -> None:
    """Memory is limited; the failure names the limit."""
    answers, failures = fetch({0: serve(answering(OK, b"x" * (MAX_ANSWER_BYTES + 2**20)))}, PATIENT)
    assert answers == {}
    assert failures == {0: f"answer longer than {MAX_ANSWER_BYTES} bytes"}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\n\r\nHandler not found: fr_trace_json", "404 Not Found"),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n200 ", "500 Internal"),
        (b"HTTP/1.1 404 Not\r\nX: a 200 b\r\n\r\n", "404 Not"),
        (b"220 mail.example ESMTP\r\n", "220 mail"),
        (b"", "answered b''"),
    ],
)
def test_any_other_answer_is_a_failure(serve: Serve, answer: bytes, reason: str) -> None:
    """The failure quotes its beginning; closing the connection at once is a failure too."""
    answers, failures = fetch({0: serve(answering(answer))}, PATIENT)
    assert answers == {}
    assert reason in failures[0]
    assert len(failures[0]) < 200


def test_a_missing_server_is_named_by_its_path(folder: str) -> None:
    """The file does not exist, is no socket, or no server listens."""
    orphan = socket.socket(socket.AF_UNIX)
    orphan.bind(f"{folder}/orphan")
    orphan.close()
    with open(f"{folder}/file", "w"):
        pass
    paths = {0: f"{folder}/missing", 1: f"{folder}/file", 2: f"{folder}/orphan", 3: folder + "/x" * 200}
    answers, failures = fetch(paths, PATIENT)
    assert answers == {}
    assert set(failures) == set(paths)
    assert all(failures[rank].startswith(f"{paths[rank]}: ") for rank in paths)


def test_a_server_that_resets_is_a_failure(serve: Serve) -> None:
    """It closed the connection without reading the request, as the kernel does for a rank that exits: not yet
    blindness.
    """
    answers, failures = fetch({0: serve(lambda connection: None)}, PATIENT)
    assert answers == {}
    assert isinstance(failures[0], NoAnswer)


def test_no_connection_outlives_the_fetch(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an answer, a failure or the deadline: repeated polls would otherwise run out of descriptors."""
    opened: list[socket.socket] = []

    class Noted(socket.socket):
        """A socket that is remembered."""

        def __init__(self, family: int) -> None:
            super().__init__(family)
            opened.append(self)

    paths = {0: serve(answering(OK + b"{}")), 1: serve(silent), 2: "/nowhere"}
    monkeypatch.setattr(collective_records, "socket", SimpleNamespace(socket=Noted, AF_UNIX=socket.AF_UNIX))
    answers, failures = fetch(paths, 0.05)
    assert (set(answers), set(failures)) == ({0}, {1, 2})
    assert [connection.fileno() for connection in opened] == [-1, -1, -1]


def test_a_failed_socket_is_a_failure_of_its_rank(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that were asked before it still answer."""
    made: list[socket.socket] = []

    class Scarce(socket.socket):
        """Only one socket can be created."""

        def __init__(self, family: int) -> None:
            if made:
                raise OSError(24, "Too many open files")
            super().__init__(family)
            made.append(self)

    paths = {0: serve(answering(OK + b"{}")), 1: "/never/asked"}
    monkeypatch.setattr(collective_records, "socket", SimpleNamespace(socket=Scarce, AF_UNIX=socket.AF_UNIX))
    answers, failures = fetch(paths, PATIENT)
    assert set(answers) == {0}
    assert failures == {1: "/never/asked: Too many open files"}
