"""Starts that fail: after progress they are tried again for a while, before it once."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import SCRIPTS, Runs

FAILED_STARTS = 4
HUB = f"""
import pathlib, sys
sys.path.insert(0, {str(SCRIPTS)!r})
failed = pathlib.Path("failed")
count = int(failed.read_text()) if failed.exists() else 0
if pathlib.Path("out/killed").exists() and count < {FAILED_STARTS}:
    failed.write_text(str(count + 1))
    raise OSError("We couldn't connect to 'https://huggingface.co'")
import odd_starts
odd_starts.main()
"""


@pytest.mark.full
def test_a_hub_that_is_away_after_a_kill_is_waited_for(runs: Runs, tmp_path: Path) -> None:
    """More failed starts than the restart budget has failures. The run then continues where it was."""
    (tmp_path / "hub.py").write_text(HUB)
    run = runs(
        "--nproc-per-node", "1", "hub.py", "--output-dir", "out", "--max-steps", "4", "--save-steps", "2",
        "--sft-steps", "1", "--save-inside-rollouts", "--kill-at-step", "3",
    ).start().ended()  # fmt: skip
    recoveries = run.status()["recoveries"]
    assert len(recoveries) == 1 + FAILED_STARTS, run.tail()
    assert "which is tried for 10 min" in run.printed()
    assert run.events("resume_chosen")[-1]["step"] >= 2
