"""Samples without a valid reward leave baseline and loss on all ranks, also in a run that is killed and
recovers.
"""

from __future__ import annotations

import json
import statistics
import zlib
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from support.runs import SCRIPTS, Runs, digest

STEPS = 6
GENERATIONS = 4
LONGEST = 20
"""Tokens of a completion."""


def reward_of(prompt: str, completion: str, faults: Collection[int]) -> float | None:
    """The sum of the functions, or None where one fails, as `failing_rewards.py` has it."""
    if zlib.crc32(completion.encode()) % 7 in faults:
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


CASES = {
    "loops": (["--loop"], ["--generation", "repetition=8"]),
    "exceptions": (["--raise"], ["--reward-workers", "1"]),
}
"""Arguments of the script, and options."""


@pytest.mark.parametrize(
    ("algorithm", "case"),
    [
        ("grpo", "loops"),
        pytest.param("rloo", "loops", marks=pytest.mark.full),
        pytest.param("grpo", "exceptions", marks=pytest.mark.full),
    ],
)
def test_groups_that_two_ranks_share(algorithm: str, case: str, runs: Runs, tmp_path: Path) -> None:
    """Each rank has half of each group, and a kill changes neither advantages nor weights.

    Completions in a loop are cut and leave too. A reward that fails once in a step that is done again is left
    out again.
    """
    arguments, options = CASES[case]
    faults = (0, 1, 2) if case == "exceptions" else (0, 1)
    words = [
        str(SCRIPTS / "failing_rewards.py"), "--algorithm", algorithm, "--max-steps", str(STEPS),
        "--save-steps", "2", "--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "3",
        "--num-generations", str(GENERATIONS), "--max-completion-length", str(LONGEST), "--output-dir", "out",
        *arguments,
    ]  # fmt: skip
    weights, counts = [], []
    for name, injections in {"calm": [], "killed": ["--inject", "kill@rank1:step6"]}.items():
        folder = tmp_path / name
        folder.mkdir()
        run = runs(
            "--nproc-per-node", "2", "--snapshot-every", "0", *options, *injections, *words,
            name=f"run-{name}", cwd=folder,
        ).start().ended()  # fmt: skip
        weights.append(digest(folder / "out"))
        excluded = {
            (event["step"], event["reason"], sample)
            for event in run.events("sample_masked")
            for sample in event["samples"]
        }
        counts.append(excluded)
        lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
        steps = {record["step"]: record for record in lines}
        assert sorted(steps) == list(range(1, STEPS + 1))
        for step, record in steps.items():
            completions = record["completion"]
            outage = {0} if case == "loops" and step == 5 else set()
            cut = {number for at, reason, number in excluded if (at, reason) == (step, "repetition")}
            assert all(completions[number].endswith("aaaa") for number in cut)
            assert cut >= {number for number, text in enumerate(completions) if text.endswith("a" * 16)}
            rewards = [
                None if number in cut | outage else reward_of(prompt, completion, faults)
                for number, (prompt, completion) in enumerate(zip(record["prompt"], completions, strict=True))
            ]
            groups = [rewards[first : first + GENERATIONS] for first in range(0, len(rewards), GENERATIONS)]
            expected = [advantage for group in groups for advantage in by_hand(algorithm, group)]
            assert record["advantages"] == pytest.approx(expected, rel=1e-3, abs=1e-4)
            left_out = {number for at, reason, number in excluded if at == step and reason != "small_group"}
            assert left_out == {number for number, reward in enumerate(rewards) if reward is None}
    assert weights[0] == weights[1]
    assert counts[0] == counts[1]
    assert {reason for _, reason, _ in counts[0]} >= {
        "nan",
        "infinite",
        "exception" if case == "exceptions" else "repetition",
    }
    assert "Excluded from the loss: " in run.events("run_ended")[-1]["sentence"]
