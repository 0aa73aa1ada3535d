"""Faults that only come again: the run ends soon, and its last line says what came again and where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.runs import SCRIPTS, Run, Runs

SCRIPT = str(SCRIPTS / "repeated_faults.py")


def launched(runs: Runs, fault: str, *options: str, steps: int = 40, ranks: int = 1) -> Run:
    return runs(
        *options, "--nproc-per-node", str(ranks), SCRIPT, "--output-dir", "out", "--fault", fault,
        "--max-steps", str(steps), "--save-steps", "4", "--cpu",
    ).start()  # fmt: skip


def sentence(run: Run) -> str:
    """How the run ended."""
    return str(run.events("run_ended")[-1]["sentence"])


def test_a_bug_on_the_third_call_of_every_process_ends_the_run_by_its_fifth_time(runs: Runs) -> None:
    """Each attempt takes two steps more, so the restart budget never runs out."""
    run = launched(runs, "third-call", "--snapshot-every", "1")
    run.ended(93)
    assert [recovery["action"] for recovery in run.status()["recoveries"]] == ["restart"] * 4 + ["stop"]
    assert "KeyError at repeated_faults.py:" in sentence(run)
    assert "in judge (phase reward) was raised 5 times within" in sentence(run)


@pytest.mark.full
def test_a_script_that_fails_before_it_continues_its_call_is_told_apart_too(runs: Runs) -> None:
    """It loads its checkpoint itself, before it calls `train()`."""
    run = launched(runs, "reads-checkpoint", "--snapshot-every", "1", steps=8)
    run.ended(93)
    assert run.status()["attempts"] == 3
    assert "this script fails when it resumes, at repeated_faults.py:" in sentence(run)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file below a folder, with its size and its time."""
    return {
        str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_run_that_cannot_be_resumed_starts_over_beside_itself(runs: Runs, tmp_path: Path) -> None:
    """Exit code 0, and nothing that the first run has written has changed; the same command then finds the
    new run.
    """
    run = launched(runs, "resume", "--on-resume-failure", "fresh", "--snapshot-every", "1", steps=8)
    run.until_event("run_ended")
    before = contents(tmp_path / "out")
    assert any(name.startswith("checkpoint-4") for name in before)
    run.ended()
    assert contents(tmp_path / "out") == before
    assert "fails when it resumes" in run.printed()
    new = json.loads((tmp_path / "run-2" / "run.json").read_text())
    assert new["starts_over"] == 1
    beside = tmp_path / f"out.{new['run_id']}"
    assert (beside / "model.safetensors").is_file()
    assert not (tmp_path / "out" / "model.safetensors").exists()
    run.start()
    run.ended()
    assert f"run {new['run_id']} has finished" in run.printed()
