"""Killed after every step and in every save, adapters and scripts with two trainers end with equal
weights.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from support.references import plain_ranks
from support.runs import SCRIPTS, Runs, digest

NO_PEFT = pytest.mark.skipif(
    importlib.util.find_spec("peft") is None, reason="the package peft is not installed"
)
SAVES = ("--save-steps", "2", "--save-inside-rollouts")
ADAPTER = ("grpo.py", "--lora", "--steps-per-generation", "2", "--max-steps", "5")
"""One generation serves two steps, so that every second kill is within a rollout."""
TWO_TRAINERS = ("sft_then_grpo.py", "--sft-steps", "4", "--max-steps", "4")
CONDITIONAL = ("odd_starts.py", "--start", "skips-sft", "--sft-steps", "3", "--max-steps", "5")
"""SFT is left out once its model is there."""
CLEARING = ("odd_starts.py", "--start", "clears", "--sft-steps", "3", "--max-steps", "5")
"""The output directories are removed by each start."""


@pytest.mark.parametrize(
    ("command", "kills", "expected", "ranks"),
    [
        pytest.param(ADAPTER, [3], 1, 2, id="adapter", marks=NO_PEFT),
        pytest.param(
            ADAPTER, [1, 2, 3, 4, 5], 7, 2, id="adapter-every-step", marks=[NO_PEFT, pytest.mark.full]
        ),
        pytest.param(TWO_TRAINERS, [1, 2, 3, 4], 10, 2, id="two-trainers", marks=pytest.mark.full),
        pytest.param(CONDITIONAL, [1, 2, 3, 4, 5], 10, 1, id="conditional", marks=pytest.mark.full),
        pytest.param(CLEARING, [1, 2, 3, 4, 5], 10, 1, id="clearing", marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(900)
def test_a_run_killed_after_steps_equals_the_undisturbed_run(
    runs: Runs, tmp_path: Path, command: tuple[str, ...], kills: list[int], expected: int, ranks: int
) -> None:
    """The kills after the last step of a stage are in its save."""
    words = [str(SCRIPTS / command[0]), *command[1:], *SAVES, "--output-dir", "out"]
    plain = tmp_path / "plain"
    plain.mkdir()
    plain_ranks(plain, words, ranks=ranks)
    run = runs(
        "--nproc-per-node", str(ranks), "--max-restarts", "40", "--snapshot-every", "1", *words,
        "--kill-after-steps", *map(str, kills),
    ).start().ended(timeout_seconds=500)  # fmt: skip
    assert digest(tmp_path / "out") == digest(plain / "out"), run.tail()
    assert len(list(tmp_path.glob("killed-*"))) >= expected, run.tail()
    assert not any(record["mismatch"] for record in run.events("resume_chosen")), run.tail()
