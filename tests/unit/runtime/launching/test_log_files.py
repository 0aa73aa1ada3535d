"""What is journaled is logged by rank, as JSON lines in files of bounded size."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import structlog
from support.journal import event

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.reporter import LiveHistory
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching import _log_files
from grpo_run.runtime.launching._log_files import log_event, log_to_file


def lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a log file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run directory with the folder of the first attempt."""
    found = RunDirectory(path=tmp_path / "run")
    found.create()
    found.attempt(0).mkdir()
    return found


@pytest.fixture
def live(run: RunDirectory) -> LiveHistory:
    """The supervisor's journal in the first attempt; what it writes is logged."""
    found = LiveHistory(run.journal, "night", log=partial(log_event, run))
    found.journal.attempt = 0
    return found


def test_events_are_logged_by_rank(run: RunDirectory, live: LiveHistory) -> None:
    """Those of no rank by the supervisor; each line says which run, attempt, rank and step it is of. Those of
    an attempt without a folder are only in the journal.
    """
    live.write(event("step_committed", step=3, train_call=1))
    live.write(event("warning", rank=1, step=3, text="slow", level="high", self_="x", args=[1]))
    ranks = LiveHistory(run.journal, "night").journal
    ranks.attempt = 0
    ranks.write(event("resume_chosen", rank=0, step=2, checkpoint=None))
    ranks.attempt = 7
    ranks.write(event("resume_chosen", rank=0, step=2, checkpoint=None))
    live.read_ranks()
    (committed,) = lines(run.log)
    assert (committed["event"], committed["rank"], committed["train_call"]) == ("step_committed", None, 1)
    (warned,) = lines(run.attempt(0) / "rank1.jsonl")
    assert {"run": "night", "attempt": 0, "rank": 1, "step": 3}.items() <= warned.items()
    assert (warned["event"], warned["level"], warned["text"]) == ("warning", "warning", "slow")
    (chosen,) = lines(run.attempt(0) / "rank0.jsonl")
    assert (chosen["event"], chosen["level"], chosen["step"]) == ("resume_chosen", "info", 2)
    assert stat.S_IMODE(run.log.stat().st_mode) == 0o600
    assert run.log in run.own_files()


def test_events_of_an_earlier_supervisor_are_not_logged_again(run: RunDirectory, live: LiveHistory) -> None:
    """They are in the journal already when a supervisor begins."""
    live.write(event("step_committed", step=3, train_call=1))
    again = LiveHistory(run.journal, "night", log=partial(log_event, run))
    again.write(event("step_committed", step=4, train_call=1))
    assert [line["step"] for line in lines(run.log)] == [3, 4]


class UserData(Event, kw_only=True):
    """An event with something of the user's data."""

    private_fields: ClassVar[tuple[str, ...]] = ("text",)

    text: str


def test_private_fields_are_not_logged(run: RunDirectory, live: LiveHistory) -> None:
    """What an event says of the user's data is in the journal only."""
    live.write(UserData(text="a secret"))
    assert "secret" in run.journal.read_text()
    assert "secret" not in run.log.read_text()


def test_a_log_is_bounded(run: RunDirectory, live: LiveHistory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full file is kept until the next one is full; every line is whole. How many lines fill a file depends
    on the clocks, so the file turns at different steps.
    """
    monkeypatch.setattr(_log_files, "MAX_BYTES", 4096)
    older = run.path / "supervisor.1.jsonl"
    turned = 0
    for step in range(200):
        before = older.stat().st_ino if older.exists() else None
        live.write(event("step_committed", step=step, train_call=1))
        turned += older.exists() and older.stat().st_ino != before
        files = [path for path in (older, run.log) if path.exists()]
        steps = [line["step"] for path in files for line in lines(path)]
        assert steps == list(range(steps[0], step + 1))
        assert not run.log.exists() or run.log.stat().st_size < 4096
    assert turned > 1
    assert 4096 <= older.stat().st_size < 4096 + 512
    assert older in run.own_files()


@pytest.fixture
def configured(run: RunDirectory) -> Iterator[None]:
    """Let structlog write to the supervisor's file until the test ends."""
    log_to_file(run)
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("configured")
def test_what_the_supervisors_process_logs_is_not_printed(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is in the supervisor's file, an exception with its traceback."""
    log = structlog.get_logger("metrics")
    log.debug("ignored")
    try:
        raise OSError("no board")
    except OSError:
        log.exception("run_not_observed", run_id="night")
    (line,) = lines(run.log)
    assert (line["event"], line["level"], line["run_id"]) == ("run_not_observed", "error", "night")
    assert "no board" in line["exception"]
    assert capfd.readouterr() == ("", "")
