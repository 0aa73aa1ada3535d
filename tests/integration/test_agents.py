"""Agents under `grpo-run launch`: tools and environments are named, limited and otherwise left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.references import plain_ranks
from support.runs import SCRIPTS, Runs, digest

SCRIPT = str(SCRIPTS / "agent.py")
STEPS = ("--output-dir", "out", "--max-steps", "4", "--save-steps", "2")


def test_a_late_asynchronous_tool_is_cancelled_and_the_run_goes_on(runs: Runs) -> None:
    """Its error is the tool's result; nothing is restarted."""
    run = runs("--tool-timeout", "2", SCRIPT, *STEPS, "--late", "3").start().ended()
    (cancelled,) = run.events("tool_cancelled")
    assert (cancelled["tool"], cancelled["seconds"]) == ("tool look_up", 2.0)
    assert "tool look_up was cancelled after 2 s (--tool-timeout)" in run.printed()
    assert run.status()["recoveries"] == []


@pytest.mark.full
def test_an_agent_that_is_killed_ends_in_the_weights_of_the_undisturbed_run(
    runs: Runs, tmp_path: Path
) -> None:
    """The tools of this script are deterministic."""
    (tmp_path / "plain").mkdir()
    plain_ranks(tmp_path / "plain", [SCRIPT, *STEPS], ranks=1)
    run = runs("--inject", "kill@rank0:step3", SCRIPT, *STEPS).start().ended()
    assert len(run.status()["recoveries"]) == 1
    measured = {event.get("callback") for event in run.events("phase_learned")}
    assert {"tool add", "tool look_up", "reset of Sums"} <= measured
    assert digest(tmp_path / "out") == digest(tmp_path / "plain" / "out")
