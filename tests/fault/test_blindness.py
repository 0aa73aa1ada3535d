"""A watchdog that cannot see says so, and hurts nobody for that alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from faults import fault
from support.references import undisturbed
from support.runs import SCRIPTS, Run, digest

GRPO = str(SCRIPTS / "grpo.py")


def test_dead_sockets_are_reported_and_nobody_is_ended(runs: Callable[..., Run]) -> None:
    """One rank is slow while the records cannot be read: a warning, no incident, the run ends well."""
    run = runs(
        *fault("slow", rank=1, step=12, seconds=3), "--nproc-per-node", "2", GRPO, "--output-dir", "out",
        "--max-steps", "20", "--save-steps", "10", "--step-seconds", "0.1",
    ).start()  # fmt: skip
    run.until_step(4)
    for rank in (0, 1):
        (run.directory / "attempts" / "000" / f"rank{rank}.sock").unlink()
    assert run.wait() == 0, run.tail()
    assert run.events("incident") == []
    texts = [event["text"] for event in run.events("warning")]
    assert any("cannot see all of rank" in text and "unknown" in text for text in texts), texts


def test_a_board_taken_away_costs_an_attempt_at_most(runs: Callable[..., Run], tmp_path: Path) -> None:
    """Truncated to nothing under everybody's feet: the supervisor lives, makes another, and the weights are equal."""
    steps = ("--max-steps", "16", "--save-steps", "4")
    run = runs(
        "--nproc-per-node", "2", GRPO, "--output-dir", "ours", *steps, "--step-seconds", "0.1",
    ).start()  # fmt: skip
    run.until_step(6)
    os.truncate(run.directory / "board.mmap", 0)
    assert run.wait() == 0, run.tail()
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", 16)
    assert run.status()["attempts"] == 2


def test_a_board_that_is_unlinked_is_not_missed(runs: Callable[..., Run]) -> None:
    """Its mapping lives on; the next attempt gets a new one."""
    run = runs(
        "--nproc-per-node", "2", GRPO, "--output-dir", "ours", "--max-steps", "16", "--save-steps", "4",
        "--step-seconds", "0.1",
    ).start()  # fmt: skip
    run.until_step(6)
    (run.directory / "board.mmap").unlink()
    run.until_step(8)
    run.kill(1)
    assert run.wait() == 0, run.tail()
    assert [recovery["cause"] for recovery in run.status()["recoveries"]] == ["signal"]
