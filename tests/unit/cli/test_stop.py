"""`grpo-run stop`: signal the supervisor and wait for it. No process is signalled here."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_run.cli.main import main
from grpo_run.runtime.record.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(here: Path) -> RunDirectory:
    """A run without a supervisor."""
    directory = RunDirectory(path=here / "runs" / "night")
    directory.create()
    directory.write_run({"run_id": "night"})
    return directory


@pytest.fixture
def owned(run: RunDirectory) -> Iterator[int]:
    """The same run, locked by this process."""
    lock = run.acquire()
    yield lock
    with contextlib.suppress(OSError):  # a test may have let it go
        os.close(lock)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that were sent."""
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.append((pid, number)))
    return signals


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
    monkeypatch.setattr(os, "kill", lambda pid, number: os.close(owned))
    assert main(["stop", "night", "--wait", "60"]) == 0


@pytest.mark.usefixtures("owned", "sent")
def test_wait_exits_with_1_after_its_time(capsys: Captured) -> None:
    """The run is still stopping."""
    assert main(["stop", "night", "--wait", "0.01"]) != 0
    assert "still stopping" in capsys.readouterr().out


@pytest.mark.usefixtures("owned")
def test_a_supervisor_that_has_just_exited_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """Exit code 2: it exited between the check and the signal."""

    def gone(pid: int, number: int) -> None:
        raise ProcessLookupError(3, "No such process")

    monkeypatch.setattr(os, "kill", gone)
    assert main(["stop", "night"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.usefixtures("run")
def test_an_inactive_run_is_refused(sent: list[tuple[int, int]], capsys: Captured) -> None:
    """Exit code 2, and no signal is sent."""
    assert main(["stop", "night"]) == 2
    assert "no run is active" in capsys.readouterr().err
    assert sent == []


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", [[], ["no-such-run"]])
def test_an_unknown_run_is_refused(capsys: Captured, words: list[str]) -> None:
    """Exit code 2 and one line with the name."""
    assert main(["stop", *words]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("grpo-run: ")
    assert shown.count("\n") == 1
