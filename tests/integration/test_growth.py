"""What the phases of a step cost is measured in a real run, also of a script that gets slower."""

from __future__ import annotations

import pytest
from support.runs import SCRIPTS, Runs

STEPS = 101
"""The first step, which is left out, and as many as are shown together."""


def test_what_phases_cost_is_journaled(runs: Runs) -> None:
    """The mean of a hundred steps. A hundred steps are too few to say that one gets slower."""
    run = runs(
        "--nproc-per-node", "1", str(SCRIPTS / "slower.py"), "--output-dir", "out", "--cpu",
        "--max-steps", str(STEPS), "--save-steps", "100", "--logging-steps", "1",
        "--max-completion-length", "2",
    ).start().ended()  # fmt: skip
    (costs,) = run.events("phase_costs")
    assert costs["step"] == STEPS
    # a sleep of 0.1 ms more in each step
    assert costs["seconds"]["reward"] >= 0.005
    assert costs["seconds"]["forward_backward"] > 0
    assert run.events("growth_found") == []


@pytest.mark.full
def test_a_reward_that_gets_slower_is_told_once(runs: Runs) -> None:
    """What it costs rises by 0.1 ms in each step, also beside other work on the machine."""
    run = runs(
        "--nproc-per-node", "1", str(SCRIPTS / "slower.py"), "--output-dir", "out", "--cpu",
        "--max-steps", "640", "--save-steps", "400", "--logging-steps", "1",
        "--max-completion-length", "2",
    ).start().ended(timeout_seconds=900)  # fmt: skip
    (found,) = run.events("growth_found")
    assert found["phase"] == "reward"
    assert found["factor"] > 2
    assert "steps get slower: phase reward takes" in run.printed()
