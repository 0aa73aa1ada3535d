"""Faults of the forkserver, the process that starts ranks and reports their exits."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, Runs, digest
from support.trainer_and_loop import TRAINER

from grpo_run.watchdog.processes import read_stat

ARGUMENTS = (
    "--nproc-per-node", "2", str(SCRIPTS / TRAINER), "--output-dir", "ours", "--max-steps", "16",
    "--save-steps", "8", "--step-seconds", "0.05",
)  # fmt: skip


@pytest.fixture
def run(runs: Runs) -> Run:
    """A run of two ranks, not started."""
    return runs(*ARGUMENTS)


def signal_server(run: Run, number: int) -> None:
    """Send a signal to the parent of the ranks."""
    stat = read_stat(run.pid(0))
    assert stat is not None
    assert stat.parent != run.process.pid
    os.kill(stat.parent, number)


def test_a_stopped_forkserver_does_not_keep_a_run_from_ending(run: Run, tmp_path: Path) -> None:
    """It is continued: it reports the exits of the ranks. Nothing happens to the ranks."""
    with run.held(after=6):
        run.start().until_step(6)
        signal_server(run, signal.SIGSTOP)
    run.ended()
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, 16)
    assert not run.events("incident")


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.full)])
def test_a_forkserver_that_dies_costs_one_attempt(run: Run, tmp_path: Path, number: int) -> None:
    """Its ranks die with it. The next ones come from another one and end with equal weights."""
    with run.held(after=6):
        run.start().until_step(6)
        signal_server(run, number)
        run.until_event("attempt_started", count=2)
    run.ended()
    assert digest(tmp_path / "ours") == undisturbed(TRAINER, 16)
    (event,) = run.events("incident")
    assert event["cause"] == "signal", event
    assert "forkserver" in event["sentence"], event
