"""`resume` on run directories, without processes of a run, and runs that a command finds by their id."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.journal import event

from grpo_run.cli.main import main
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.registry import register, registry_folder

Captured = pytest.CaptureFixture[str]
MakeRun = Callable[..., RunDirectory]


@pytest.fixture
def make_run(here: Path, monkeypatch: pytest.MonkeyPatch) -> MakeRun:
    """Create a run that has committed step 7 of 9 and ended with a code; None for one that was killed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(here / "state"))

    def make(path: Path, code: int | None = None, **fields: Any) -> RunDirectory:
        run = RunDirectory(path=path)
        run.create()
        run.write_run({"run_id": path.name, **fields})
        journal = Journal(run.journal, path.name)
        journal.write(event("run_started"))
        call = {"train_call": 1, "trainer_class": "GRPOTrainer", "output_dir": str(here / "out")}
        journal.write(event("train_started", rank=0, step=0, target_steps=9, **call))
        journal.write(event("step_committed", step=7, train_call=1))
        journal.write(
            event("checkpoint_published", step=5, train_call=1, path=str(here / "out" / "checkpoint-5"))
        )
        if code is not None:
            journal.write(event("run_ended", exit_code=code, sentence=""))
        return run

    return make


def output_of(capsys: Captured, *words: str, code: int = 0) -> str:
    """Run a command and return what it prints."""
    assert main(words) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_registered_run_is_found_by_its_id(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """By all commands that take a run."""
    register(make_run(here / "elsewhere" / "evening", 75).path, registry_folder())
    assert "Stopped at step 7 of 9" in output_of(capsys, "status", "evening")
    register(make_run(here / "other" / "evening", 75).path, registry_folder())
    assert "several runs" in output_of(capsys, "status", "evening", code=2)


def test_resume_shows_the_command_of_the_run(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """In its directory, with its variables, without the option that would start another run."""
    inputs = {"files": {}, "variables": {"SEED": "2"}, "environment": {}, "settings": {}, "versions": {}}
    typed = ["--fresh", "--run-id", "night", "--nproc-per-node=2", "--max-restarts", "5", "train.py"]
    typed += ["--fresh", "a b"]
    run = make_run(here / "runs" / "night", 75, typed=typed, inputs=inputs, working_directory=str(here))
    shown = output_of(capsys, "resume", "night", "--dry-run", "--accept-change")
    command = (
        f"--run-dir {run.path.resolve()} --accept-change --nproc-per-node=2 --max-restarts 5 train.py --fresh"
        " 'a b'"
    )
    assert shown == f"grpo-run: in {here}: SEED=2 grpo-run launch {command}\n"


@pytest.mark.parametrize("form", ["{} {}", "{}={}"])
def test_resume_leaves_out_an_address_that_was_not_recorded(
    make_run: MakeRun, here: Path, capsys: Captured, form: str
) -> None:
    """It says so; an address in a file is kept. The script's own arguments stay as they are."""
    url = "https://hooks.example.org/..."
    words = f"{form.format('--notify', url)} {form.format('--heartbeat-url', 'file')} train.py --notify {url}"
    make_run(here / "runs" / "night", 75, typed=words.split(), working_directory=str(here))
    warning, shown = output_of(capsys, "resume", "night", "--dry-run").splitlines()
    assert "warning: continuing without --notify" in warning
    assert shown.endswith(f" {form.format('--heartbeat-url', 'file')} train.py --notify {url}")


def test_resume_refuses_a_directory_that_is_gone(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """One line that says so."""
    make_run(here / "runs" / "night", 75, typed=["train.py"], working_directory="/nonexistent/place")
    shown = output_of(capsys, "resume", "night", code=2)
    assert "does not exist any more" in shown
    assert shown.count("\n") == 1


def test_resume_refuses_a_live_run(make_run: MakeRun, here: Path, capsys: Captured) -> None:
    """It has nothing to resume."""
    run = make_run(here / "runs" / "night", typed=["train.py"], working_directory=str(here))
    lock = run.acquire()
    assert "is running" in output_of(capsys, "resume", "night", code=2)
    os.close(lock)
