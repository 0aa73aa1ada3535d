"""Real programs that wait, judged by the reader of /proc and the proof."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from support.waiting_programs.registry import (
    ALIVE,
    HUNG,
    LONG_SECONDS,
    SHORT_SECONDS,
    UNTIL_LATER,
    UNTIL_SOON,
)

from grpo_run.runtime.supervisor.detection._wait_looks import LookReader
from grpo_run.watchdog.waits.looks import WaitingThread
from grpo_run.watchdog.waits.proof import StuckRank, prove_stuck

NAMES = [*HUNG, *UNTIL_LATER, *UNTIL_SOON, *ALIVE]


@pytest.fixture(scope="module")
def judged() -> Iterator[dict[str, StuckRank | None]]:
    """What the proof says of each program; all run at the same time and are looked at three times."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    server = socket.create_server(("127.0.0.1", 0), backlog=16)
    programs = {}
    others: set[int] = set()
    try:
        for name in NAMES:
            programs[name] = subprocess.Popen(
                [sys.executable, "-m", "support.waiting_programs", name, str(server.getsockname()[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,
            )
        idle = {}
        for index, program in enumerate(programs.values()):
            assert program.stdout is not None
            idle[index] = [int(word) for word in program.stdout.readline().split()]
        for program in programs.values():
            assert program.stdin is not None
            program.stdin.write(b"\n")
            program.stdin.close()
        time.sleep(2.0)
        reader = LookReader()
        pids = {index: program.pid for index, program in enumerate(programs.values())}
        first = reader.read(pids, idle)
        for look in first.values():
            others |= look.processes.keys()
        time.sleep(1.2)
        last = reader.read(pids, idle)
        assert reader.refused == {}
        yield {name: prove_stuck(first[index], last[index]) for index, name in enumerate(programs)}
    finally:
        for program in programs.values():
            program.kill()
        for pid in others - {os.getpid()}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for program in programs.values():
            program.wait()
        server.close()


@pytest.mark.parametrize("name", HUNG)
def test_a_program_that_nothing_can_wake_is_proved_stuck(
    judged: dict[str, StuckRank | None], name: str
) -> None:
    """For ever."""
    found = judged[name]
    assert found is not None
    assert math.isinf(found.until_seconds)


@pytest.mark.parametrize("name", UNTIL_LATER)
def test_a_program_that_sleeps_is_known_to_do_nothing_until_then(
    judged: dict[str, StuckRank | None], name: str
) -> None:
    """Its sleep ends at a time of this machine's clock."""
    found = judged[name]
    assert found is not None
    assert LONG_SECONDS - 600 < found.until_seconds - time.monotonic() <= LONG_SECONDS


@pytest.mark.parametrize("name", UNTIL_SOON)
def test_a_program_that_wakes_soon_is_never_called_stuck_for_longer(
    judged: dict[str, StuckRank | None], name: str
) -> None:
    """What it waits for happens at the end of a short sleep."""
    found = judged[name]
    assert found is None or found.until_seconds - time.monotonic() <= SHORT_SECONDS


@pytest.mark.parametrize("name", ALIVE)
def test_a_program_that_something_may_wake_is_never_proved_stuck(
    judged: dict[str, StuckRank | None], name: str
) -> None:
    """It waits for something outside, with a time limit, or for a process at work."""
    assert judged[name] is None


def test_only_a_thread_that_has_run_is_read_again() -> None:
    """Unless everything is to be read, as for the look that proves something."""
    child = subprocess.Popen(["sh", "-c", "read a; read b"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    reader = LookReader()

    def waiting() -> WaitingThread:
        deadline = time.monotonic() + 20.0
        while True:
            thread = reader.read({0: child.pid}, {0: ()})[0].main_thread
            assert thread is not None
            if thread.state == "S" and thread.registers:
                return thread
            assert time.monotonic() < deadline
            time.sleep(0.01)

    try:
        first = waiting()
        assert waiting() is first
        reader.forget()
        again = waiting()
        assert again == first
        assert again is not first
        child.stdin.write(b"x\n")
        child.stdin.flush()
        deadline = time.monotonic() + 20.0
        while waiting().switches == first.switches:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a process of another user")
def test_a_process_that_may_not_be_traced_is_unknown_and_the_refusal_is_named() -> None:
    """Another user's process shows no system calls; nothing is proved, and nothing fails."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        reader = LookReader()
        look = reader.read({0: os.getppid()}, {0: ()})[0]
        proved = prove_stuck(look, look)
        os.write(writing, f"{proved} {reader.refused[0]}".encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert answer.read() == "None the system calls of its threads may not be read (Permission denied)"
    os.waitpid(child, 0)
