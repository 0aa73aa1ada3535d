"""A step whose ranks are busy without an end is ended, and the run recovers to the weights of an undisturbed
one.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Runs, digest


@pytest.mark.full
@pytest.mark.timeout(400)
def test_collectives_without_end_are_no_progress(runs: Runs, tmp_path: Path) -> None:
    """They count as progress of their phase; the clock of the step ends them, and says where the time
    went.
    """
    run = runs(
        "--nproc-per-node", "2", "--deadline-first", "25", "--vote-timeout", "50", "--deadline-ceiling", "65",
        str(SCRIPTS / "endless_step.py"), "--output-dir", "out", "--max-steps", "12", "--save-steps", "4",
        "--endless-at", "6",
    ).start().ended(timeout_seconds=300)  # fmt: skip
    (recovery,) = run.status()["recoveries"]
    assert recovery["cause"] == "no_progress", run.tail()
    (incident,) = run.events("incident")
    assert "No step was committed for" in incident["sentence"]
    assert "reward" in incident["sentence"]
    assert digest(tmp_path / "out") == undisturbed("grpo.py", 12)
