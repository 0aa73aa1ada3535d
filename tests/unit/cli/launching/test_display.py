"""What `grpo-run launch` prints of a starting run, and how long its metrics stay after the end. No supervisor
is started here."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.builders.launch_commands import prepare

from grpo_run.cli.launching._display import CommandDisplay, DisplayOptions
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import RunStatus


def shown(here: Path, address: str, mode: int = 0o700) -> CommandDisplay:
    """The display of a run `x` in `mine`, a directory of this mode, after the run was announced."""
    prepared = prepare(["--show-ranks", "all", "--run-dir", "mine", "--run-id", "x", "train.py"])
    directory = RunDirectory(path=prepared.config.run_directory)
    directory.create()
    directory.path.chmod(mode)
    display = CommandDisplay(DisplayOptions(metrics_addr=address))
    display.reserve()
    display.begin(prepared.config, tell=lambda text: None)
    status = RunStatus(
        run_id="x", state="stopped", sentence="", history=History(), slots=(), supervisor_pid=None
    )  # fmt: skip
    display.announce(directory, lambda: status)
    return display


def said(display: CommandDisplay, capsys: pytest.CaptureFixture[str], *, until: float = 0.0) -> list[str]:
    """The lines of the display, after the end of a run whose metrics may stay so long."""
    display.linger(ended_at=time.monotonic(), until=until, interrupted=lambda: False)
    display.finish(lambda: False)
    display.release()
    return [line.partition("grpo-run: ")[2] for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755])
def test_a_private_directory_is_announced_without_a_warning(
    here: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, with a path that is short inside the working directory."""
    assert said(shown(here, "off", mode), capsys) == ["run x in mine"]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_directory_that_others_can_write_is_warned_of(
    here: Path, mode: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its mode is not changed: it may be a directory that others need."""
    _, warning = said(shown(here, "off", mode), capsys)
    assert f"other users can write to mine (mode {mode:04o})" in warning
    assert (here / "mine").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize(("host", "warned"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_metrics_that_are_open_to_the_network_are_warned_of(
    here: Path, host: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The warning is a line of grpo-run, not a log record."""
    place, *warnings = said(shown(here, f"{host}:0"), capsys)
    assert place.startswith(f"run x in mine, metrics on http://{host}:")
    assert [("can be read from the network" in line) for line in warnings] == [True] * warned


@pytest.mark.parametrize(("left_seconds", "waits"), [(2.5, True), (-1.0, False)])
def test_a_stopped_run_stays_for_a_scraper_within_its_time(
    here: Path, left_seconds: float, waits: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a scrape it leaves when its time is over; a stop that took longer exits at once."""
    display = shown(here, "127.0.0.1:0")
    assert display._server is not None
    began = time.monotonic()
    display._server._collector._scrapes.extend([began - 30.0, began])
    lines = said(display, capsys, until=began + left_seconds)
    assert max(left_seconds, 0.0) <= time.monotonic() - began < (20.0 if waits else 2.0)
    assert [line for line in lines if "waiting up to" in line] == lines[1:]
    assert len(lines) == 1 + waits
