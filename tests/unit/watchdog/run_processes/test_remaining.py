"""Which processes remain and what they may wait for, with real processes.

The test process is a stranger: a process S takes the place of the supervisor, and its child R that of a rank.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_run.watchdog.run_processes.ownership import TOKEN_VARIABLE, RunProcesses
from grpo_run.watchdog.run_processes.remaining import RemainingProcesses
from grpo_run.watchdog.stalls.exit_hangs import ExitFacts

DEADLINE_SECONDS = 20.0
TOKEN = f"t0ken-{os.getpid()}"
"""No other tests on this machine use it."""
SUPERVISOR = """
import os, subprocess, sys
rank = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[1], *sys.argv[2:]], start_new_session=True, close_fds=False)
rank.wait()
"""  # noqa: E501
PROLOGUE = "import os, socket, subprocess, sys, time\nprint(os.getpid(), flush=True)\n"
EPILOGUE = "\nprint('ready', flush=True)\ntime.sleep(600)\n"


class Rank:
    """A process R, the process S that started it, and what can be seen of them."""

    def __init__(self, body: str, *arguments: str, environment: dict[str, str]) -> None:
        self.supervisor = subprocess.Popen(
            [sys.executable, "-S", "-c", SUPERVISOR, PROLOGUE + body + EPILOGUE, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}, text=True,
        )  # fmt: skip
        assert self.supervisor.stdout is not None
        self.pid = int(self.supervisor.stdout.readline())
        self.lines = []
        while (line := self.supervisor.stdout.readline()).strip() != "ready":
            assert line, "the rank has died"
            self.lines.append(line.strip())
        self.owned = RunProcesses(self.supervisor.pid, os.getsid(self.supervisor.pid), tokens=[TOKEN])
        self.owned.begin_attempt([self.pid])
        self.remaining = RemainingProcesses(self.owned, keep=["kept *"])

    def look(self) -> ExitFacts:
        """Observe, with connections."""
        found = self.remaining.observe({0: self.pid}, connections=True)
        assert found is not None
        return found

    def own(self) -> set[int]:
        """The pids of its own processes."""
        return {pid for pid, _ in self.look().own}


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait for the kernel or another process."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def start() -> Iterator[Callable[..., Rank]]:
    """Start ranks that run a body and then sleep; everything is killed after the test."""
    started: list[Rank] = []

    def begin(body: str, *arguments: str, environment: dict[str, str] | None = None) -> Rank:
        started.append(Rank(body, *arguments, environment=environment or {}))
        return started[-1]

    yield begin
    for rank in started:
        for pid in (*(int(line) for line in rank.lines), rank.pid, rank.supervisor.pid):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        rank.supervisor.communicate(timeout=DEADLINE_SECONDS)


def test_a_rank_alone_waits_for_nothing(start: Callable[..., Rank]) -> None:
    """The pipes of its standard streams come from whoever started the run."""
    rank = start("a, b = socket.socketpair()\nr, w = os.pipe()")
    found = rank.look()
    assert {pid for pid, _ in found.own} == {rank.pid}
    assert found.states.keys() == {0}
    assert found.waits_for == ()


def test_a_child_in_a_session_of_its_own_is_the_ranks(start: Callable[..., Rank]) -> None:
    """Loggers start their helpers so. One that has exited is nothing to wait for."""
    rank = start(
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\ngone ="
        " subprocess.Popen(['true'])\nos.waitid(os.P_PID, gone.pid, os.WEXITED |"
        " os.WNOWAIT)\nprint(child.pid)"
    )
    child = int(rank.lines[0])
    assert rank.own() == {rank.pid, child}
    assert rank.look().waits_for == (f"process {child} (sleep)",)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: rank.own() == {rank.pid})
    assert rank.look().waits_for == ()


DAEMON = """
r, w = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(w, str(os.getpid()).encode())
        {descriptors}
        {then}
        os._exit(0)
    os._exit(0)
os.wait()
print(os.read(r, 20).decode())
os.close(r), os.close(w)
"""


def test_a_daemon_is_found_by_the_environment_that_it_inherited(start: Callable[..., Rank]) -> None:
    """Its parent has exited, so it is a child of init."""
    body = DAEMON.format(descriptors="os.close(r), os.close(w)", then="os.execvp('sleep', ['sleep', '600'])")
    rank = start(body, environment={TOKEN_VARIABLE: TOKEN})
    wait_until(lambda: "sleep" in Path(f"/proc/{rank.lines[0]}/comm").read_text())
    assert int(rank.lines[0]) in rank.own()
    assert rank.look().waits_for == (f"process {rank.lines[0]} (sleep)",)


def test_a_process_that_was_a_child_stays_the_ranks(start: Callable[..., Rank]) -> None:
    """Its parent exits after it was seen."""
    rank = start(
        "middle = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!; exec sleep 600'],"
        " start_new_session=True, stdout=subprocess.PIPE,"
        " text=True)\nprint(middle.stdout.readline().strip())\nprint(middle.pid)"
    )
    child, middle = (int(line) for line in rank.lines)
    assert rank.own() == {rank.pid, middle, child}
    os.kill(middle, signal.SIGKILL)
    wait_until(lambda: middle not in rank.own())
    assert child in rank.own()


@pytest.mark.parametrize("family", ["unix", "tcp", "tcp6"])
def test_a_server_on_this_machine_is_awaited(start: Callable[..., Rank], family: str, tmp_path: Path) -> None:
    """Until it closes the connection."""
    address: object = str(tmp_path / "s")
    kind = socket.AF_UNIX
    if family != "unix":
        kind, address = (
            (socket.AF_INET, ("127.0.0.1", 0)) if family == "tcp" else (socket.AF_INET6, ("::1", 0))
        )
    with socket.socket(kind) as listening:
        try:
            listening.bind(address)  # type: ignore[arg-type]
        except OSError:
            pytest.skip("no IPv6 here")
        listening.listen()
        where = listening.getsockname()
        rank = start(f"held = socket.socket(socket.{kind.name})\nheld.connect({where!r})")
        accepted, _ = listening.accept()
    with accepted:
        assert rank.look().waits_for == ("a connection to a process outside the job",)
    wait_until(lambda: rank.look().waits_for == ())


def test_helpers_that_wait_for_the_rank_are_not_waited_for(start: Callable[..., Rank]) -> None:
    """Multiprocessing starts one with every shared object; it ends when the rank does."""
    rank = start("from multiprocessing import resource_tracker\nresource_tracker.ensure_running()")
    assert len(rank.own()) == 2
    wait_until(lambda: rank.look().waits_for == ())  # until then the helper's program has not begun


def test_what_the_supervisor_started_is_not_the_ranks(start: Callable[..., Rank]) -> None:
    """Forkserver and drain worker are its children too, and hold pipes to the ranks."""
    rank = start("pass")
    other = start("pass")
    assert other.pid not in rank.own()


def test_a_rank_that_may_not_be_read_is_unknown(start: Callable[..., Rank]) -> None:
    """No facts instead of zeros."""
    rank = start("pass")
    assert rank.remaining.observe({0: 2**22 + 1}, connections=False) is not None
    if os.geteuid() != 0:
        assert rank.remaining.observe({0: 1}, connections=False) is None


def test_without_ranks_what_is_kept_and_services_are_nothing_to_wait_for(start: Callable[..., Rank]) -> None:
    """A helper that works is. With the rank alive, each of them counts."""
    rank = start(
        "from multiprocessing import resource_tracker\nresource_tracker.ensure_running()\n"
        "print(resource_tracker._resource_tracker._pid)\n"
        "for name in ('sleep', 'kept'):\n"
        "    print(subprocess.Popen([name, '600'], executable='/bin/sleep', start_new_session=True).pid)"
    )
    service, helper, kept = (int(line) for line in rank.lines)
    wait_until(lambda: {rank.pid, service, helper, kept} == rank.own())
    os.kill(rank.pid, signal.SIGKILL)

    def without_rank() -> set[int]:
        found = rank.remaining.observe({}, connections=False)
        assert found is not None
        return {pid for pid, _ in found.own}

    wait_until(lambda: without_rank() == {helper})
