"""A recovery that is disturbed while it loads from memory ends in the weights of an undisturbed run."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import plain_ranks
from support.runs import SCRIPTS, Runs, digest

STEPS = ("--max-steps", "12", "--save-steps", "4")


def test_a_kill_and_a_damaged_slot_during_loading_lose_nothing_that_was_on_disk(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the kill the snapshot is loaded from disk; the damaged one is not used, and the next older one
    is.
    """
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setenv("TEST_STAGING", str(memory))
    run = runs(
        "--snapshot-every", "1", "--snapshot-dir", str(memory),
        str(SCRIPTS / "odd_loads.py"), "--output-dir", "out", *STEPS,
    ).start().ended()  # fmt: skip
    (tmp_path / "plain").mkdir()
    plain_ranks(tmp_path / "plain", [str(SCRIPTS / "grpo.py"), "--output-dir", "out", *STEPS], ranks=1)
    assert digest(tmp_path / "out") == digest(tmp_path / "plain" / "out"), run.tail()
    chosen = [
        (record["attempt"], record["step"], record["in_memory"]) for record in run.events("resume_chosen")
    ]
    assert chosen[:3] == [(0, 0, False), (1, 5, True), (2, 5, False)], run.tail()
    attempt, step, in_memory = chosen[3]
    assert (attempt, in_memory) == (3, False)
    assert step < 9
    assert "the snapshot in memory cannot be used" in run.printed()
