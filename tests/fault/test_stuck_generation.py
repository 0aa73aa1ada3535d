"""Generation that does not return in time twice at one step is made in smaller calls, one after another."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest

ROWS = 4
"""Of a rank's rollout, by the script's defaults."""


@pytest.mark.timeout(200)
def test_generation_that_stalls_twice_continues_in_smaller_calls(runs: Runs, tmp_path: Path) -> None:
    """Greedy completions do not depend on their batch, so the weights are those of an undisturbed run."""
    run = runs(
        "--nproc-per-node", "2", "--deadline-floor", "4", "--deadline-first", "6",
        str(SCRIPTS / "stuck_generation.py"), "--output-dir", "out", "--max-steps", "5", "--save-steps", "1",
        "--most-rows", str(ROWS // 2),
    ).start().ended(timeout_seconds=150)  # fmt: skip
    assert [one["cause"] for one in run.events("incident")] == ["generation_stall"] * 2, run.tail()
    assert [one["action"] for one in run.events("action")] == ["restart", "restart_with_plan_change"]
    (changed,) = run.events("plan_changed")
    assert changed["plan"] == {"generation_sub_batches": 2}
    assert "generation in 2 parts; generation has not returned in time twice at this step" in run.tail()
    assert digest(tmp_path / "out") == undisturbed("stuck_generation.py", 5)
