"""Legitimate waits that end from outside: by a server, or by a helper that is no descendant of the process.

The third part of `waits.py`, which describes them.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import http.server
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Sequence

from waits import FOREVER, WokenUp, handling, legitimate, wake_up

SERVER_VARIABLE = "SLOW_SERVER"
"""Host and port of a server outside the job that answers `GET /<seconds>` after so many seconds."""


@legitimate
def _server(seconds: float) -> None:
    host, _, port = os.environ[SERVER_VARIABLE].partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(f"GET /{seconds} HTTP/1.0\r\n\r\n".encode())
        assert connection.recv(100)


@legitimate
def _http(seconds: float) -> None:
    with urllib.request.urlopen(f"http://{os.environ[SERVER_VARIABLE]}/{seconds}", timeout=600) as answer:
        assert answer.read()


@legitimate
def _http_in_thread(seconds: float) -> None:
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        pool.submit(_http, seconds).result()


@legitimate
def _event_of_server(seconds: float) -> None:
    done = threading.Event()
    threading.Thread(target=lambda: (_server(seconds), done.set())).start()
    done.wait()


@legitimate
def _signal_of_helper_in_lock(seconds: float) -> None:
    lock = threading.Lock()
    lock.acquire()
    with handling(signal.SIGUSR1, wake_up), contextlib.suppress(WokenUp):
        _detached(f"sleep {seconds}; kill -USR1 {os.getpid()}")
        lock.acquire()


def _detached(command: str, *, pass_fds: Sequence[int] = ()) -> None:
    """Start a shell command that is no descendant of this process and has a session of its own."""
    twice = ["setsid", "sh", "-c", 'sh -c "$1" >/dev/null 2>&1 &', "sh", command]
    subprocess.run(twice, check=True, pass_fds=pass_fds)


@legitimate
def _pipe_of_helper(seconds: float) -> None:
    reading, writing = os.pipe()
    _detached(f"sleep {seconds}; echo > /proc/self/fd/{writing}", pass_fds=[writing])
    os.close(writing)
    select.select([reading], [], [])
    os.close(reading)


@legitimate
def _fifo_of_helper(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        _detached(f"sleep {seconds}; echo > {folder}/fifo")
        with open(f"{folder}/fifo") as fifo:  # blocks until the helper opens it
            assert fifo.read()


@legitimate
def _open_fifo_of_helper(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.mkfifo(f"{folder}/fifo")
        descriptor = os.open(f"{folder}/fifo", os.O_RDWR)  # as servers do, so that it never ends
        _detached(f"sleep {seconds}; echo > {folder}/fifo")
        assert os.read(descriptor, 1)
        os.close(descriptor)


@legitimate
def _file_lock_of_helper(seconds: float) -> None:
    with tempfile.NamedTemporaryFile() as file:
        with open(file.name, "rb") as theirs:
            fcntl.flock(theirs, fcntl.LOCK_EX)
            _detached(f"sleep {seconds}", pass_fds=[theirs.fileno()])
        fcntl.flock(file, fcntl.LOCK_EX)


@legitimate
def _file_of_helper(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _detached(f"sleep {seconds}; touch {folder}/ready")
        while not os.path.exists(f"{folder}/ready"):
            time.sleep(0.5)


@legitimate
def _socket_of_helper(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        code = f"import socket, time; time.sleep({seconds}); socket.socket(1).connect('{folder}/socket')"
        _detached(f'{sys.executable} -S -c "{code}"')
        listener.accept()[0].close()


@legitimate
def _datagram_of_helper(seconds: float) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("127.0.0.1", 0))
        port = receiver.getsockname()[1]
        _detached(f"sleep {seconds}; exec bash -c 'echo > /dev/udp/127.0.0.1/{port}'")
        receiver.recv(10)


@legitimate
def _stopped_child(seconds: float) -> None:
    child = subprocess.Popen(["sleep", "0.2"])
    child.send_signal(signal.SIGSTOP)
    _detached(f"sleep {seconds}; kill -CONT {child.pid}")
    child.wait()


@legitimate
def _signal_of_helper_in_sleep(seconds: float) -> None:
    with handling(signal.SIGUSR1, wake_up), contextlib.suppress(WokenUp):
        _detached(f"sleep {seconds}; kill -USR1 {os.getpid()}")
        time.sleep(FOREVER)


@legitimate
def _pid_descriptor_of_helper(seconds: float) -> None:
    reading, writing = os.pipe()
    _detached(f"echo $$ > /proc/self/fd/{writing}; exec sleep {seconds}", pass_fds=[writing])
    descriptor = os.pidfd_open(int(os.read(reading, 20)))
    os.close(reading)
    os.close(writing)
    watching = select.poll()
    watching.register(descriptor, select.POLLIN)
    watching.poll()
    os.close(descriptor)


@legitimate
def _file_change_of_helper(seconds: float) -> None:
    library = ctypes.CDLL(None)
    with tempfile.TemporaryDirectory() as folder:
        descriptor = library.inotify_init()
        library.inotify_add_watch(descriptor, folder.encode(), 0x100)  # IN_CREATE
        _detached(f"sleep {seconds}; touch {folder}/new")
        assert os.read(descriptor, 1000)
        os.close(descriptor)


@legitimate
def _socket_pair_of_helper(seconds: float) -> None:
    ours, theirs = socket.socketpair()
    code = f"import os, time; time.sleep({seconds}); os.write({theirs.fileno()}, b'x')"
    _detached(f'{sys.executable} -S -c "{code}"', pass_fds=[theirs.fileno()])
    theirs.close()
    assert ours.recv(1)
    ours.close()


@legitimate
def _accept_of_helper(seconds: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        _detached(f"sleep {seconds}; exec bash -c 'echo > /dev/tcp/127.0.0.1/{port}'")
        listener.accept()[0].close()


@legitimate
def _own_server_of_helper(seconds: float) -> None:
    """The rank serves HTTP in a thread, and waits for a request that a helper makes."""
    asked = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            asked.set()

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    _detached(f"sleep {seconds}; {sys.executable} -c \"import urllib.request as r; r.urlopen('{url}')\"")
    asked.wait()
    server.shutdown()
    server.server_close()


@legitimate
def _helper_left_running(seconds: float) -> None:
    _detached(f"sleep {seconds}")


@legitimate
def _child_waits_for_lock_of_helper(seconds: float) -> None:
    """The rank waits for a child, the child waits in a lock, and a helper outside signals the child."""
    code = (
        "import signal, sys, threading; signal.signal(signal.SIGUSR1, lambda *_: sys.exit());"
        " lock = threading.Lock(); lock.acquire(); print(flush=True); lock.acquire()"
    )
    child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    _detached(f"sleep {seconds}; kill -USR1 {child.pid}")
    child.wait()
    child.stdout.close()


@legitimate
def _socket_sent_to_helper(seconds: float) -> None:
    """The only other end of a socket pair lies unread in a socket of a helper outside, which takes it
    later.
    """
    ours, theirs = socket.socketpair()
    sender, receiver = socket.socketpair()
    code = (
        "import os, socket, time;"
        f" time.sleep({seconds});"
        f" os.write(socket.recv_fds(socket.socket(fileno={receiver.fileno()}), 1, 1)[1][0], b'x')"
    )
    _detached(f'{sys.executable} -S -c "{code}"', pass_fds=[receiver.fileno()])
    socket.send_fds(sender, [b"x"], [theirs.fileno()])
    for each in (theirs, receiver):
        each.close()
    assert ours.recv(1)
    for each in (ours, sender):
        each.close()
