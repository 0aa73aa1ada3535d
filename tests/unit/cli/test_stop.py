"""`grpo-run stop`: ask the supervisor and wait for it. A process that is not the supervisor is never
signaled.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from grpo_run.cli.main import main
from grpo_run.runtime.board import stop_requests
from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.processes.identity import own_identity, own_namespace

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that were sent."""
    signals: list[tuple[int, int]] = []

    def record(descriptor: int, number: int) -> None:
        (pid,) = re.findall(r"Pid:\s+(\d+)", Path(f"/proc/self/fdinfo/{descriptor}").read_text())
        signals.append((int(pid), number))

    monkeypatch.setattr(signal, "pidfd_send_signal", record)
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    return signals


def write_lock(run: RunDirectory, **changes: object) -> None:
    """Change what the lock says about the supervisor."""
    identity = {**vars(own_identity()), **changes}
    run.lock.write_text(f"{json.dumps(identity)}\n")


@pytest.mark.usefixtures("owned")
def test_the_supervisor_receives_sigterm(sent: list[tuple[int, int]], capsys: Captured) -> None:
    """Batch systems send the same signal."""
    assert main(["stop", "night"]) == 0
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert str(os.getpid()) in capsys.readouterr().out


def test_wait_returns_when_the_supervisor_exits(
    owned: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Exit code 0."""
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda descriptor, number: os.close(owned))
    assert main(["stop", "night", "--wait", "60"]) == 0


@pytest.mark.usefixtures("owned", "sent")
def test_wait_exits_with_1_after_its_time(capsys: Captured) -> None:
    """The run is still stopping."""
    assert main(["stop", "night", "--wait", "0.01"]) != 0
    assert "still stopping" in capsys.readouterr().out


@pytest.mark.usefixtures("owned")
def test_a_supervisor_that_has_just_exited_is_reported(
    run: RunDirectory, sent: list[tuple[int, int]], capsys: Captured
) -> None:
    """Exit code 2: it exited between the check and the signal, and another process has its pid."""
    write_lock(run, started_ticks=1)
    assert main(["stop", "night"]) == 2
    shown = capsys.readouterr().err
    assert "just exited" in shown
    assert shown.count("\n") == 1
    assert sent == []


@pytest.mark.usefixtures("owned")
@pytest.mark.parametrize("taken", [True, False])
def test_a_supervisor_in_another_container_is_asked_through_the_board(
    run: RunDirectory,
    sent: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
    taken: bool,
) -> None:
    """Its pid is that of another process here, which is not signaled. Without an answer one line says so."""
    boot = own_namespace().split(" ")[0]
    write_lock(run, namespace=f"{boot} pid:[1]")
    board = Board.create(run.board, 1)
    monkeypatch.setattr(stop_requests, "ANSWER_SECONDS", 20.0 if taken else 0.1)
    delivered: list[str] = []
    requests = stop_requests.StopRequests(lambda: board, lambda: delivered.append("stop"))
    if taken:
        requests.start()
    assert main(["stop", "night"]) == (0 if taken else 2)
    requests.end()
    captured = capsys.readouterr()
    assert ("another container" in captured.out, "stop it there" in captured.err) == (taken, not taken)
    assert (captured.out + captured.err).count("\n") == 1
    assert delivered == (["stop"] if taken else [])
    assert sent == []


@pytest.mark.usefixtures("owned")
@pytest.mark.parametrize("command", ["stop", "save"])
def test_a_supervisor_on_another_machine_is_refused(
    run: RunDirectory, sent: list[tuple[int, int]], capsys: Captured, command: str
) -> None:
    """The board is not shared with it. The line names the machine."""
    Board.create(run.board, 1)
    write_lock(run, namespace="another-boot pid:[1]", host="gpu-7")
    assert main([command, "night"]) == 2
    shown = capsys.readouterr().err
    assert "gpu-7" in shown
    assert shown.count("\n") == 1
    assert sent == []
    assert Board.open(run.board).requests == (False, 0)


def test_a_supervisor_that_exits_instead_of_answering_is_reported(
    run: RunDirectory, owned: int, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """It was asked through the board at its very end."""
    write_lock(run, namespace=f"{own_namespace().split(' ')[0]} pid:[1]")
    monkeypatch.setattr(stop_requests, "ask", lambda path: bool(os.close(owned)))
    assert main(["stop", "night"]) == 2
    assert "just exited" in capsys.readouterr().err


@pytest.mark.usefixtures("owned")
def test_a_request_is_repeated_for_a_supervisor_that_is_starting(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It replaces the board of the last one, which nobody reads."""
    Board.create(run.board, 1)
    boards: list[Board] = []
    requests = stop_requests.StopRequests(lambda: boards[-1], lambda: None)

    def replaced() -> None:
        boards.append(Board.create(run.board, 1))
        requests.start()

    timer = threading.Timer(0.5, replaced)
    timer.start()
    monkeypatch.setattr(stop_requests, "ANSWER_SECONDS", 60.0)
    assert stop_requests.ask(run.board)
    timer.join()
    requests.end()
