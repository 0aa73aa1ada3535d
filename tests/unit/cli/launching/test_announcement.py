"""What a starting run prints. No supervisor is started here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_run.cli.launch import open_listener
from grpo_run.cli.launching.command import parse
from grpo_run.cli.launching.supervise import announce
from grpo_run.runtime.history.run_directory import RunDirectory


def announced(here: Path, *words: str, mode: int = 0o700) -> list[str]:
    """What is printed when a run in a directory of this mode starts."""
    command = parse([*words, "train.py"])
    directory = RunDirectory(path=command.config.run_directory)
    directory.create()
    directory.path.chmod(mode)
    lines: list[str] = []
    supervisor, terminal = SimpleNamespace(status=None), SimpleNamespace(notify=lines.append)
    listener = open_listener(command)
    server = announce(command, directory, supervisor, terminal, listener)  # type: ignore[arg-type]
    if server is not None:
        server.stop(5.0)
    return lines


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_private_directory_is_announced_without_a_warning(here: Path, mode: int) -> None:
    """One line, with a path that is short inside the working directory."""
    assert announced(here, "--metrics-addr", "off", "--run-dir", "mine", "--run-id", "x", mode=mode) == [
        "run x in mine"
    ]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write_is_warned_of(here: Path, mode: int) -> None:
    """Its mode is not changed: it may be a directory that others need."""
    _, warning = announced(here, "--metrics-addr", "off", "--run-dir", "mine", mode=mode)
    assert f"other users can write to mine (mode {mode:04o})" in warning
    assert (here / "mine").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_metrics_that_are_open_to_the_network_are_warned_of(
    here: Path, host: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning is a line of grpo-run, not a log record."""
    place, *warnings = announced(here, "--metrics-addr", f"{host}:0", "--run-dir", "mine", "--run-id", "x")
    assert place.startswith(f"run x in mine, metrics on http://{host}:")
    assert [("can be read from the network" in line) for line in warnings] == [True] * warned
    assert capsys.readouterr().err == ""
