"""A plan of `--memory-plan`, from the start or in the middle of a rollout, ends in the weights of the
script's own settings.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.memory_plans import ROUNDING, Shortage, reference, short_of_memory
from support.runs import Runs, digest
from support.weights import relative_difference

pytestmark = pytest.mark.full


def test_a_launch_with_another_plan_goes_on_in_the_middle_of_a_rollout(runs: Runs, tmp_path: Path) -> None:
    """From the checkpoint that the first launch has left on disk, with a quarter of its micro-batch."""
    case = Shortage(name="relaunched", inject=("kill@rank0:step4",), plans=())
    expected = reference(case, tmp_path, runs)
    run = short_of_memory(case, runs, tmp_path / "out", "--max-restarts", "0").start()
    run.ended(93)
    again = short_of_memory(
        case, runs, tmp_path / "out", "--memory-plan", "micro-batch=4,checkpointing"
    ).start()
    again.ended()
    assert [event["step"] for event in again.events("resume_chosen")] == [0, 3]
    (applied,) = again.events("memory_plan_applied")
    assert (applied["per_device_train_batch_size"], applied["gradient_accumulation_steps"]) == (2, 4)
    assert relative_difference(tmp_path / "out", expected) <= ROUNDING


@pytest.mark.parametrize(
    ("plan", "mode", "script", "exact"),
    [
        ("micro-batch=2,checkpointing", "", "grpo.py", False),
        ("micro-batch=4", "", "rloo.py", False),
        ("micro-batch=2", "", "sft.py", False),
        ("sub-batches=3", "", "greedy.py", True),
        ("checkpointing", "zero2", "grpo.py", True),
        ("micro-batch=2", "zero2", "grpo.py", False),
        ("micro-batch=2,sub-batches=3", "zero3", "greedy.py", False),
        ("micro-batch=2", "fsdp2", "grpo.py", False),
    ],
)
def test_a_plan_from_the_start_changes_no_weights_also_if_a_rank_is_killed(
    plan: str, mode: str, script: str, exact: bool, runs: Runs, tmp_path: Path
) -> None:
    """Sharded parameters are gathered on all ranks, so they must make as many calls of generation."""
    case = Shortage(name=plan, inject=("kill@rank1:step2",), plans=(), script=script, mode=mode)
    expected = tmp_path / "expected"
    undisturbed = short_of_memory(replace(case, inject=()), runs, expected, name="reference-run").start()
    undisturbed.ended()
    run = short_of_memory(case, runs, tmp_path / "out", "--memory-plan", plan).start()
    run.ended()
    assert [event["cause"] for event in run.events("incident")] == ["signal"], run.tail()
    if exact:
        assert digest(tmp_path / "out") == digest(expected)
    else:
        assert 0 < relative_difference(tmp_path / "out", expected) <= ROUNDING
