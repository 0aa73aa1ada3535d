"""Faults that only come again: the run ends soon, and its last line says what came again and where."""

from __future__ import annotations

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


def test_a_run_that_cannot_be_resumed_says_so_and_fresh_starts_another(runs: Runs) -> None:
    """In the same output directory; it ends as if there had been no first run."""
    run = launched(runs, "resume", "--snapshot-every", "1", steps=8)
    run.ended(93)
    assert "this script fails when it resumes, at repeated_faults.py:" in sentence(run)
    assert "--fresh starts a new run" in run.printed()
    run.directory = run.seen_as = run.folder / "again"
    run.arguments.insert(0, "--fresh")
    run.start()
    run.ended()
    assert (run.cwd / "out" / "model.safetensors").is_file()
