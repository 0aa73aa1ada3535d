"""A deadline of generation on ranks of very different speed: no rank leaves another inside a collective."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import SCRIPTS, Runs, digest

SLOW_STEPS = (2, 4)
TOKENS, SECONDS_A_TOKEN, DEADLINE_SECONDS = 40, 0.4, 4.0
"""Rank 1 would take 16 s for a rollout, and rank 0 takes a fraction of a second."""


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ddp", "zero3", "fsdp2"])
def test_a_slow_rank_is_cut_and_no_rank_hangs(mode: str, runs: Runs, tmp_path: Path) -> None:
    """With DDP only the slow rank's rollout is cut. Sharded weights keep ranks in step: both are cut, after
    as many tokens.
    """
    slow = [f"slow-generation@rank1:step{step}:seconds={SECONDS_A_TOKEN}" for step in SLOW_STEPS]
    run = runs(
        *(word for fault in slow for word in ("--inject", fault)),
        "--generation", f"max_time={DEADLINE_SECONDS}", "--generation", "repetition=64",
        "--nproc-per-node", "2", str(SCRIPTS / "grpo.py"), "--output-dir", str(tmp_path / "out"),
        "--max-steps", "6", "--save-steps", "3", "--max-completion-length", str(TOKENS), mode=mode,
    ).start().ended()  # fmt: skip
    assert run.status()["recoveries"] == [], run.tail()
    cut = {
        (event["step"], event["rank"]): event["decoding_steps"] for event in run.events("completions_capped")
    }
    ranks = (1,) if mode == "ddp" else (0, 1)
    assert {(step - 1, rank) for step in SLOW_STEPS for rank in ranks} <= set(cut), (cut, run.tail())
    for step in SLOW_STEPS:
        assert cut[step - 1, 1] < TOKENS
        if mode != "ddp":
            assert abs(cut[step - 1, 0] - cut[step - 1, 1]) <= 1, cut


@pytest.mark.full
def test_a_run_killed_after_a_cut_ends_in_equal_weights(runs: Runs, tmp_path: Path) -> None:
    """The rollout that was cut is generated again, at full speed, and ends after the same token."""
    digests, cuts = {}, {}
    for name, faults in (("undisturbed", ()), ("killed", ("kill@rank0:step4",))):
        slow = "slow-generation@rank1:step2:seconds=2"  # four tokens take 8 s
        run = runs(
            *(word for fault in (slow, *faults) for word in ("--inject", fault)),
            "--generation", "max_time=7", "--snapshot-dir", "off", "--nproc-per-node", "2",
            str(SCRIPTS / "grpo.py"), "--output-dir", str(tmp_path / name), "--max-steps", "6",
            "--save-steps", "6", "--max-completion-length", "12", name=f"run-{name}",
        ).start().ended()  # fmt: skip
        digests[name] = digest(tmp_path / name)
        cuts[name] = [
            (event["attempt"], event["step"], event["rank"], event["decoding_steps"])
            for event in run.events("completions_capped")
        ]
    assert cuts["undisturbed"] == [(0, 1, 1, 4)]
    assert cuts["killed"] == [(0, 1, 1, 4), (1, 1, 1, 4)]
    assert digests["killed"] == digests["undisturbed"]
