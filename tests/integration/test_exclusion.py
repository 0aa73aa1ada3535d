"""Samples without a valid reward leave baseline and loss on all ranks, also in a run that is killed and recovers."""

from __future__ import annotations

import json
import math
import statistics
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.runs import SCRIPTS, Run, digest

STEPS = 6
GENERATIONS = 4


def rewards_of(prompt: str, completion: str) -> float | None:
    """The sum of both functions, or None where the first one fails, as `failing_rewards.py` has it."""
    if zlib.crc32(completion.encode()) % 7 in (0, 1):
        return None
    return len(set(prompt) & set(completion)) + 0.1 * len(set(completion))


def by_hand(algorithm: str, rewards: Sequence[float | None]) -> list[float]:
    """The advantages of one group over its survivors."""
    left = [reward for reward in rewards if reward is not None]
    if len(left) < 2:
        return [0.0] * len(rewards)
    mean = statistics.fmean(left)
    advantages = []
    for reward in rewards:
        if reward is None:
            advantages.append(0.0)
        elif algorithm == "grpo":
            advantages.append((reward - mean) / (statistics.stdev(left) + 1e-4))
        else:
            advantages.append(reward - (sum(left) - reward) / (len(left) - 1))
    return advantages


@pytest.mark.parametrize("algorithm", ["grpo", pytest.param("rloo", marks=pytest.mark.full)])
def test_groups_that_two_ranks_share(algorithm: str, runs: Callable[..., Run], tmp_path: Path) -> None:
    """Each rank has half of each group, and a kill changes neither advantages nor weights."""
    words = [
        str(SCRIPTS / "failing_rewards.py"), "--algorithm", algorithm, "--max-steps", str(STEPS), "--save-steps", "2",
        "--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "3", "--num-generations", str(GENERATIONS),
        "--output-dir", "out",
    ]  # fmt: skip
    weights, counts = [], []
    for name, injections in {"calm": [], "killed": ["--inject", "kill@rank1:step4"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        run = runs("--nproc-per-node", "2", *injections, *words, name=f"run-{name}", cwd=folder).start()
        assert run.wait() == 0, run.tail()
        weights.append(digest(folder / "out"))
        excluded = {
            (event["step"], event["reason"], tuple(event["samples"]))
            for event in run.events("sample_excluded")
        }
        counts.append(excluded)
        steps = {}
        for line in (folder / "steps.jsonl").read_text().splitlines():
            record = json.loads(line)
            steps[record["step"]] = record
        assert sorted(steps) == list(range(1, STEPS + 1))
        for record in steps.values():
            rewards = [
                rewards_of(prompt, completion)
                for prompt, completion in zip(record["prompt"], record["completion"], strict=True)
            ]
            expected = [
                advantage
                for first in range(0, len(rewards), GENERATIONS)
                for advantage in by_hand(algorithm, rewards[first : first + GENERATIONS])
            ]
            assert record["advantages"] == pytest.approx(expected, rel=1e-3, abs=1e-4)
            numbers = sum(
                len(samples)
                for step, reason, samples in excluded
                if step == record["step"] and reason != "small_group"
            )
            assert numbers == rewards.count(None)
    assert weights[0] == weights[1]
    assert counts[0] == counts[1]
    assert {reason for _, reason, _ in counts[0]} >= {"nan", "infinite"}
    assert not any(math.isnan(float(event.get("loss") or 0.0)) for event in run.events("step_logged"))
    assert "Excluded from the loss: " in run.events("run_ended")[-1]["sentence"]
