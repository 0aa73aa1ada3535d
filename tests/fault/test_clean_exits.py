"""Healthy runs report no recoveries and no warnings on a busy machine."""

from __future__ import annotations

import pytest
from support.oddities import load
from support.runs import SCRIPTS, Runs


@pytest.mark.alone
@pytest.mark.parametrize("count", [2, pytest.param(100, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_clean_exits_under_load(count: int, runs: Runs) -> None:
    """Every run on Gloo exits with 0, without recoveries or warnings."""
    outcomes = []
    with load():
        for number in range(count):
            run = runs(
                "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", f"out{number}",
                "--max-steps", "4", "--save-steps", "2", name=f"run{number}",
            ).start()  # fmt: skip
            code = run.wait(180)
            status = run.status()
            outcomes.append((code, len(status["recoveries"]), status["warnings"], status["state"]))
    assert outcomes == [(0, 0, 0, "finished")] * count
