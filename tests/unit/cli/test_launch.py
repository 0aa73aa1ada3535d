"""`grpo-run launch`: the run directory, and when a run starts. No supervisor is started here."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from support.web_hooks import SECRET, receiver

from grpo_run.cli.main import main
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching._configuration import PreparedLaunch
from grpo_run.runtime.launching.request import RunResult


@pytest.fixture
def supervised(monkeypatch: pytest.MonkeyPatch) -> list[RunDirectory]:
    """The directories of the runs that would have been supervised; each ends with 75."""
    directories: list[RunDirectory] = []

    def supervise(made: PreparedLaunch, directory: RunDirectory, *rest: object) -> RunResult:
        assert directory.owner() is not None
        directories.append(directory)
        return RunResult(
            exit_code=75,
            state="stopped",
            sentence="",
            run_id=made.config.run_id,
            run_directory=directory.path,
        )

    monkeypatch.setattr("grpo_run.runtime.launching._supervise.supervise", supervise)
    return directories


@pytest.mark.parametrize("address", ["192.0.2.1:9460", "127.0.0.1", "nowhere.invalid:1"])
def test_a_metrics_address_that_cannot_be_used_leaves_nothing_behind(
    here: Path, supervised: list[RunDirectory], capsys: pytest.CaptureFixture[str], address: str
) -> None:
    """Exit code 2, one line, and no run directory."""
    before = sorted(here.iterdir())
    assert main(["launch", "--metrics-addr", address, "train.py"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(here.iterdir()) == before
    assert supervised == []


def test_a_given_metrics_address_that_is_taken_is_an_error(
    here: Path, supervised: list[RunDirectory], capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever scrapes it would find another run there; only the default address moves on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["launch", "--metrics-addr", f"127.0.0.1:{port}", "train.py"]) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"--metrics-addr: port {port} of 127.0.0.1 is in use" in printed
    assert supervised == []


def test_the_command_of_on_end_is_told_a_failure_of_grpo_run_itself(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before there is a supervisor: code 93, a report, and the command has run."""

    def fail(*arguments: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("grpo_run.runtime.launching._supervise.supervise", fail)
    assert main(["launch", "--on-end", "cat > end.json; exit 4", "train.py"]) == 93
    record = json.loads((here / "end.json").read_bytes())
    assert (record["state"], record["exit_code"]) == ("failed", 93)
    assert "PermissionError" in record["sentence"]
    assert "warning: the command of --on-end exited with code 4" in capsys.readouterr().err


def test_a_failure_of_grpo_run_itself_is_told_to_notify(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before there is a supervisor. Nothing shows the secret part of the address."""

    def fail(launch: object, *arguments: object) -> int:
        raise PermissionError(13, f"Permission denied {launch!r}")

    monkeypatch.setattr("grpo_run.runtime.launching._supervise.supervise", fail)
    monkeypatch.setenv("no_proxy", "*")
    with receiver() as server:
        words = ["--heartbeat-url", server.url, "train.py", "--notify", "https://other.example/kept"]
        assert main(["launch", "--run-dir", "run", f"--notify={server.url}", *words]) == 93
        (text,) = server.texts
        assert server.pings == []
    assert "grpo-run itself failed: PermissionError" in text
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err + (here / "run/run.json").read_text()
    typed = json.loads((here / "run/run.json").read_bytes())["typed"]
    assert typed[-3:] == words[-3:]
