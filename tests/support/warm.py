"""Start Python programs as forks of a process that has imported torch, transformers, TRL and grpo-run.

A cold `grpo-run launch` spends about 6 s of CPU on imports, once in the supervisor and once in the
forkserver. Here a launcher imports once, for all pytest workers. `start` returns a `subprocess.Popen`, or a
`WarmProcess` that behaves like one: same exit codes, signals, session, working directory, environment and
standard streams.

A process starts cold when the test asks for it, when `pytest --cold` is given, and when its environment holds
other values than the launcher's for a variable that libraries read at import. `warm_server.py` is the other
side.
"""

from __future__ import annotations

import array
import atexit
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from grpo_run.runtime.launch.resolution import READ_AT_IMPORT

SERVER = Path(__file__).with_name("warm_server.py")
LOADER = f"exec(compile(open({str(SERVER)!r}).read(), '<warm launcher>', 'exec'))"
READY_SECONDS = 120.0
EXIT = struct.Struct("i")
EXTENSIONS = Path(__file__).parents[2] / "build" / "torch_extensions"
"""Where DeepSpeed compiles its extensions, apart from the user's cache; see `remove_stale_locks`."""
STALE_SECONDS = 180.0
"""Compiling takes less than a minute."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
}
"""Variables of every real run in tests, on top of the environment of pytest."""
ROOM = {"SPT_NOENV": "1", "TEST_WARM_ROOM": "-" * 16384}
"""Variables of the launcher: its forks show their own in /proc in the place of all of these."""
starts: Counter[str] = Counter()
"""How many processes were started warm and cold, for the summary at the end of a test run."""
always_cold = False
"""Set by `pytest --cold`."""
SHARED = "TEST_WARM_LAUNCHER"
"""Variable that names the launcher's folder in the environment of pytest's workers."""
_launcher: _Launcher | None = None
AT_START = frozenset(os.environ)
"""Names of the variables that pytest was started with."""


class WarmProcess:
    """A process forked by the launcher, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, arguments: Sequence[str], connection: socket.socket, pid: int) -> None:
        self.args = list(arguments)
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit code, or None while the process runs; a signal's number is negative."""
        if self.returncode is None and _is_ready(self._connection, 0.0):
            self._receive()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end.

        Raises:
            subprocess.TimeoutExpired: it has not ended after `timeout` seconds.
        """
        if self.returncode is None:
            if not _is_ready(self._connection, timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._receive()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _receive(self) -> None:
        reply = self._connection.recv(EXIT.size, socket.MSG_WAITALL)
        if len(reply) < EXIT.size:
            raise RuntimeError("the warm launcher has died, and with it the exit code of this process")
        self.returncode = EXIT.unpack(reply)[0]
        self._connection.close()
        os.close(self._pidfd)


Process = subprocess.Popen[bytes] | WarmProcess


class _Launcher:
    """The launcher process, as its clients see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._address = str(folder / "socket")
        self._log = folder / "log"

    @classmethod
    def started(cls) -> _Launcher:
        """Start a launcher that ends with this process."""
        made = cls(Path(tempfile.mkdtemp(prefix="grpo-run-warm-")))
        with socket.socket(socket.AF_UNIX) as listener, open(made._log, "wb") as log:
            listener.bind(made._address)
            listener.listen(16)
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", LOADER, str(listener.fileno()), str(os.getpid())],
                env={**os.environ, **QUIET, **ROOM}, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
                stdout=log, stderr=log,
            )  # fmt: skip
        atexit.register(made._end, process)
        return made

    def start(
        self, arguments: Sequence[str], *, script_directory_in_path: bool, cwd: Path,
        environment: Mapping[str, str], streams: Sequence[int], inside: int,
    ) -> WarmProcess:  # fmt: skip
        """Fork a process that runs the Python script `arguments[0]`."""
        request = json.dumps({
            "arguments": list(arguments), "cwd": str(cwd), "environment": dict(environment),
            "script_directory_in_path": script_directory_in_path, "inside": inside,
        }).encode()  # fmt: skip
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(READY_SECONDS)
        try:
            connection.connect(self._address)
            connection.sendall(struct.pack("I", len(request)))
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", streams))]
            connection.sendmsg([b"\0"], rights)
            connection.sendall(request)
            reply = connection.recv(EXIT.size, socket.MSG_WAITALL)
        except OSError as error:
            raise RuntimeError(f"the warm launcher does not answer: {self._log.read_text()}") from error
        if len(reply) < EXIT.size:
            raise RuntimeError(f"the warm launcher did not start {arguments}: {self._log.read_text()}")
        connection.settimeout(None)
        return WarmProcess(arguments, connection, EXIT.unpack(reply)[0])

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill the launcher; the processes that it has forked continue."""
        process.kill()
        process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def share() -> None:
    """Start the launcher of all workers: called by pytest's controller, before it starts them."""
    global _launcher
    _launcher = _Launcher.started()
    os.environ[SHARED] = str(_launcher.folder)


def start(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    stdout: int | IO[bytes],
    stderr: int | None = None,
    stdin: int | None = None,
    cold: bool | None = None,
    inside: int = 0,
) -> Process:
    """Start a Python script in a session of its own.

    Args:
        command: a console script, a Python file, or `[sys.executable, "-P", file]`, and its arguments.
        stdout: receives standard output, and standard error if `stderr` is not given.
        stderr: descriptor that receives standard error.
        stdin: descriptor of standard input; nothing by default.
        cold: start a new interpreter, or fork one whatever the environment; by default the environment
            decides.
        inside: pid of a process whose namespaces it enters if it starts warm; then the process that is
            returned waits for it, as `nsenter` does.
    """
    global _launcher
    isolated = list(command[:2]) == [sys.executable, "-P"]
    if cold is None:
        cold = import_time(environment) != import_time({**os.environ, **QUIET})
    if cold or always_cold:
        starts["cold"] += 1
        interpreter = [sys.executable] if command[0].endswith(".py") else []
        return subprocess.Popen(
            [*interpreter, *command], cwd=cwd, env=dict(environment), stdout=stdout,
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stderr=subprocess.STDOUT if stderr is None else stderr,
            start_new_session=True,  # a test may signal the whole group
        )  # fmt: skip
    starts["warm"] += 1
    if _launcher is None:
        folder = os.environ.get(SHARED)
        _launcher = _Launcher(Path(folder)) if folder else _Launcher.started()
    output = stdout if isinstance(stdout, int) else stdout.fileno()
    with open(os.devnull, "rb") as nothing:
        return _launcher.start(
            command[2:] if isolated else command, script_directory_in_path=not isolated, cwd=cwd,
            environment=environment,
            streams=[nothing.fileno() if stdin is None else stdin, output,
            output if stderr is None else stderr], inside=inside,
        )  # fmt: skip


def run(
    command: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    cold: bool | None = None,
    timeout_seconds: float = 120.0,
    piped: bytes | None = None,
) -> tuple[int, str]:
    """Start a Python script as `start` does and wait for it.

    Args:
        piped: what it can read from a pipe on its standard input, at most 64 KiB.

    Returns:
        The exit code, and what was printed to standard output and standard error.
    """
    with contextlib.ExitStack() as opened:
        printed = opened.enter_context(tempfile.TemporaryFile())
        stdin = None
        if piped is not None:
            stdin, writer = os.pipe()
            opened.callback(os.close, stdin)
            with open(writer, "wb") as pipe:
                pipe.write(piped)
        variables = {**os.environ, **QUIET} if environment is None else environment
        process = start(command, cwd=cwd, environment=variables, stdout=printed, stdin=stdin, cold=cold)
        try:
            code = process.wait(timeout_seconds)
        finally:
            process.kill()
        printed.seek(0)
        return code, printed.read().decode(errors="replace")


def remove_stale_locks() -> None:
    """Remove locks of compilations that were killed: torch waits for them without a deadline."""
    for lock in EXTENSIONS.rglob("lock"):
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            lock.unlink(missing_ok=True)


def import_time(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that libraries read at import, without PYTHONPATH."""
    return {
        name: value
        for name, value in environment.items()
        if READ_AT_IMPORT.fullmatch(name) and name != "PYTHONPATH"
    }


def remove_variables_of_libraries() -> None:
    """Remove the variables that a library has set when a test imported it into pytest.

    TRL and DeepSpeed do. Passed on to later launches, they would differ from the environment of the warm
    launcher.
    """
    for name in import_time(os.environ).keys() - AT_START:
        del os.environ[name]


def _is_ready(connection: socket.socket, timeout_seconds: float | None) -> bool:
    """Whether there is something to read; unlike `select`, with any number of open files."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(None if timeout_seconds is None else timeout_seconds * 1000))
