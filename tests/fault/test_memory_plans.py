"""A rank that runs out of GPU memory costs one restart with another memory plan, and the run ends in the same
weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.memory_plans import (
    CHECKPOINTED,
    HALVED,
    QUARTERED,
    SEGMENTS,
    Shortage,
    check,
    reference,
    short_of_memory,
)
from support.runs import Runs

TWO_HALVINGS = Shortage(
    name="two halvings in a rollout",
    inject=("oom@rank1:step2:phase=backward:rows=2",),
    plans=(HALVED, QUARTERED),
)
PARTS = {"generation_sub_batches": 2}


def test_more_than_two_of_eight_rows_never_fit_and_the_run_ends_in_the_same_weights(
    runs: Runs, tmp_path: Path
) -> None:
    """In the middle of a rollout, on one rank; and the plan is kept after a kill."""
    expected = reference(TWO_HALVINGS, tmp_path, runs)
    run = (
        short_of_memory(TWO_HALVINGS, runs, tmp_path / "out", "--inject", "kill@rank0:step4").start().ended()
    )
    check(TWO_HALVINGS, run, tmp_path / "out", expected, kills=1)
    printed = run.output.read_text(errors="replace")
    assert "per_device_train_batch_size 4 -> 2, gradient_accumulation_steps 2 -> 4" in printed


CAMPAIGN = [
    *(
        Shortage(
            name=f"{phase} in step {step}", inject=(f"oom@rank1:step{step}:phase={phase}",), plans=(HALVED,)
        )
        for phase in ("score", "forward", "backward")
        for step in (1, 3)
    ),
    *(
        Shortage(
            name=f"generate in step {step}", script="greedy.py",
            inject=(f"oom@rank1:step{step}:phase=generate",),
            plans=(PARTS,), exact=True,
        )
        for step in (1, 3)
    ),
    *(
        Shortage(
            name=f"optimizer in step {step}", inject=(f"oom@rank1:step{step}:phase=optimizer",),
            plans=(SEGMENTS,),
            exact=True,
        )
        for step in (1, 2)
    ),
    *(
        Shortage(name=f"{phase} in the middle of a rollout", inject=(f"oom@rank0:step2:phase={phase}",),
        plans=(HALVED,))
        for phase in ("forward", "backward")
    ),
    Shortage(
        name="two halvings from the first step", inject=("oom@rank0:step1:phase=forward:rows=2",),
        plans=(HALVED, QUARTERED),
    ),
    Shortage(
        name="one phase after the other",
        inject=("oom@rank1:step1:phase=backward", "oom@rank0:step3:phase=optimizer"),
        plans=(HALVED, HALVED | SEGMENTS),
    ),
    Shortage(
        name="two iterations over a rollout", inject=("oom@rank1:step3:phase=backward:rows=4",),
        plans=(HALVED,), words=("--num-iterations", "2"),
    ),
    Shortage(
        name="accumulated over two micro-batches", inject=("oom@rank1:step2:phase=backward:rows=2",),
        plans=(HALVED,), batch_size=4, words=("--gradient-accumulation-steps", "2"),
    ),
    Shortage(
        name="rollouts that grow past what fits", script="growing.py", batch_size=6,
        inject=("oom@rank1:step1:phase=backward:tokens=130",), plans=(HALVED,),
        words=("--max-steps", "8", "--steps-per-generation", "1", "--num-generations", "3"),
    ),
    Shortage(
        name="RLOO", script="rloo.py", inject=("oom@rank1:step2:phase=backward:rows=4",), plans=(HALVED,)
    ),
    Shortage(
        name="adapters", inject=("oom@rank1:step2:phase=backward:rows=4",), plans=(HALVED,),
        words=("--lora", "--lora-dropout", "0"),
    ),
    Shortage(name="SFT", script="sft.py", inject=("oom@rank1:step2:phase=backward:rows=4",), plans=(HALVED,)),
    *(
        Shortage(
            name=f"{mode} backward", inject=("oom@rank1:step2:phase=backward:rows=4",), plans=(HALVED,),
            mode=mode
        )
        for mode in ("zero2", "zero3", "fsdp2")
    ),
    Shortage(
        name="zero2 optimizer", inject=("oom@rank1:step2:phase=optimizer",),
        plans=({"optimizer_offload": True},),
        mode="zero2",
    ),
    Shortage(
        name="zero3 generate", script="greedy.py", inject=("oom@rank1:step3:phase=generate",), plans=(PARTS,),
        mode="zero3",
    ),
    Shortage(
        name="generate never more than 4 rows", script="greedy.py",
        inject=("oom@rank1:step1:phase=generate:rows=4",),
        plans=(PARTS, {"generation_sub_batches": 4}), exact=True,
    ),
    Shortage(
        name="micro-batch of one", inject=("oom@rank1:step2:phase=backward",), plans=(CHECKPOINTED,),
        batch_size=1, words=("--gradient-accumulation-steps", "2", "--steps-per-generation", "4"), exact=True,
    ),
    Shortage(
        name="micro-batch of an odd size", inject=("oom@rank1:step2:phase=backward",), plans=(CHECKPOINTED,),
        batch_size=6 // 2, words=("--steps-per-generation", "4", "--num-generations", "3"), exact=True,
    ),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", CAMPAIGN, ids=str)
def test_a_rank_that_runs_out_of_memory_changes_no_weights(
    case: Shortage, runs: Runs, tmp_path: Path
) -> None:
    """In every phase, at the first step, in a rollout, as NCCL's error, and more than once."""
    expected = reference(case, tmp_path, runs)
    run = short_of_memory(case, runs, tmp_path / "out").start().ended()
    check(case, run, tmp_path / "out", expected)
