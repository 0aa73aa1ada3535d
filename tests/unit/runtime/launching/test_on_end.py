"""The command of `--on-end`, run by a real shell."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
from support.journal import event

from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching._on_end import STOP_SECONDS, end_record, leave_at, run_on_end, status_or_none
from grpo_run.runtime.launching.request import RunResult


def test_the_command_reads_the_record_on_its_standard_input(tmp_path: Path) -> None:
    """More than a pipe holds, whatever it contains."""
    record = {"sentence": "Rätsel \udcff \n" + "x" * 200_000, "exit_code": 93}
    warnings: list[str] = []
    run_on_end(f"cat > {tmp_path}/got", record, warn=warnings.append)
    assert json.loads((tmp_path / "got").read_bytes()) == record
    assert warnings == []


def test_a_command_that_does_not_read_its_input_ends() -> None:
    """Nothing waits for its reading."""
    run_on_end("true", {"sentence": "x" * 200_000}, warn=pytest.fail)


@pytest.mark.parametrize(
    ("command", "text"), [("exit 3", "exited with code 3"), ("kill -9 $$", "was killed by signal 9")]
)
def test_its_failure_is_a_warning(command: str, text: str) -> None:
    """One line."""
    warnings: list[str] = []
    run_on_end(command, {}, warn=warnings.append)
    assert warnings == [f"the command of --on-end {text}"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path, interrupted: bool) -> None:
    """At its time limit, or when the user wants to exit."""
    warnings: list[str] = []
    began = time.monotonic()

    def is_interrupted() -> bool:
        return interrupted and (tmp_path / "child").exists() and bool((tmp_path / "child").read_text())

    run_on_end(
        f"sleep 600 & echo $! > {tmp_path}/child; wait",
        {},
        warn=warnings.append,
        interrupted=is_interrupted,
        longest_seconds=600.0 if interrupted else 1.0,
    )
    assert time.monotonic() - began < 60.0
    (warning,) = warnings
    assert "was killed" in warning
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        try:
            if "Z" in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]:
                return
            os.kill(child, 0)
        except (FileNotFoundError, ProcessLookupError):
            return
        time.sleep(0.05)
    pytest.fail(f"{child} is alive")


def test_the_record_has_the_verdict_of_the_last_incident(tmp_path: Path) -> None:
    """And what `status --json` says of the end."""
    run = RunDirectory(path=tmp_path / "night")
    run.create()
    run.write_run({"run_id": "night"})
    incident = run.incidents / "0001-signal"
    incident.mkdir()
    (incident / "verdict.json").write_text('{"cause": "signal"}')
    journal = Journal(run.journal, "night")
    journal.write(event("run_started"))
    journal.write(event("incident", step=7, cause="signal", culprit=1, incident=str(incident)))
    journal.write(event("run_ended", exit_code=93, sentence="Gave up."))
    ended = RunResult(
        run_id="night",
        run_directory=run.path,
        exit_code=93,
        state="failed",
        sentence="Gave up.",
        status=status_or_none(run),
    )
    record = end_record(ended)
    assert record["verdict"] == {"cause": "signal"}
    assert (record["schema"], record["state"], record["exit_code"], record["attempts"]) == (
        1,
        "failed",
        93,
        0,
    )
    assert record["recoveries"][0]["rank"] == 1
    assert json.loads(json.dumps(record)) == record


def test_a_run_that_cannot_be_read_has_a_record_too(tmp_path: Path) -> None:
    """Its fields are null; how it ended is known."""
    status = status_or_none(RunDirectory(path=tmp_path / "nothing"))
    assert status is None
    ended = RunResult(
        run_id="night", run_directory=tmp_path, exit_code=93, state="failed", sentence="It failed."
    )
    record = end_record(ended)
    assert (record["sentence"], record["step"], record["verdict"]) == ("It failed.", None, None)


@pytest.mark.parametrize(
    ("signals", "stopped", "until"),
    [
        ([], False, math.inf),
        ([100.0], False, math.inf),
        ([100.0, 105.0], True, 100.0 + STOP_SECONDS),
        ([], True, -math.inf),
    ],
)
def test_a_stop_leaves_time_until_the_scheduler_kills(
    signals: list[float], stopped: bool, until: float
) -> None:
    """Counted from the first signal, because saving takes a part of it. Another node's stop leaves none."""
    assert leave_at(signals, stopped=stopped) == until
