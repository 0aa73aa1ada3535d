"""Ranks that wait for one another are told once, while the run goes on, and by status and report."""

from __future__ import annotations

import json

import pytest
from support.runs import SCRIPTS, Runs

SECONDS, STEPS = 4, 13


@pytest.mark.full
@pytest.mark.parametrize("how", ["generate", "forward_backward"])
def test_ranks_that_wait_for_one_another_are_told_once(how: str, runs: Runs) -> None:
    """In generation the ranks take turns; in the passes of training it is always the same."""
    if how == "generate":
        slow = [f"slow-generation@rank{step % 2}:step{step}:seconds=0.7" for step in range(3, STEPS)]
        who = (
            "they wait now for one and now for another of ranks 0 and 1. To change that, shuffle the data set"
        )
    else:
        slow = [f"slow@rank1:step{step}:phase=forward_backward:seconds={SECONDS}" for step in range(3, STEPS)]
        who = "the others wait for rank 1. To change that, shuffle the data set"
    run = runs(
        *(word for fault in slow for word in ("--inject", fault)), "--nproc-per-node", "2",
        str(SCRIPTS / "grpo.py"), "--output-dir", "out", "--max-steps", str(STEPS), "--save-steps", "100",
    ).start().ended()  # fmt: skip
    (advice,) = run.events("advice")
    assert advice["text"].startswith(f"ranks wait for one another in {how}, ")
    assert who in advice["text"]
    assert run.printed().count(advice["text"]) == 1
    assert advice["text"] in run.command("status")
    assert advice["text"] in json.loads(run.command("report", "--format", "json"))["growth"]
    assert run.status()["recoveries"] == []
