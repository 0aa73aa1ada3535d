"""The memory plan: what it says, and what it refuses."""

from __future__ import annotations

import pydantic
import pytest

from grpo_run.runtime.features.memory_plan._plan import MemoryPlan
from grpo_run.runtime.features.memory_plan.settings import parse_memory_plan


def test_the_default_changes_nothing() -> None:
    assert not MemoryPlan().changed
    assert MemoryPlan().text == ""


def test_the_text_names_what_is_changed_only() -> None:
    plan = MemoryPlan(micro_batch_divisor=4, gradient_checkpointing=True)
    assert plan.text == "micro-batch=4,checkpointing"


@pytest.mark.parametrize(
    "field",
    [
        {"micro_batch_divisor": 0},
        {"generation_sub_batches": 0},
        {"vllm_gpu_memory_utilization": 1.5},
        {"no_such_field": 1},
    ],
)
def test_a_plan_that_no_run_can_have_is_refused(field: dict[str, float]) -> None:
    with pytest.raises(pydantic.ValidationError):
        MemoryPlan.model_validate(field)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("micro-batch=2, checkpointing", MemoryPlan(micro_batch_divisor=2, gradient_checkpointing=True)),
        (
            "sub-batches=4,vllm-share=0.25,vllm-sleep,offload,expandable-segments",
            MemoryPlan(
                generation_sub_batches=4, vllm_gpu_memory_utilization=0.25, vllm_sleep=True,
                optimizer_offload=True, expandable_segments=True,
            ),
        ),
    ],
)  # fmt: skip
def test_the_option_is_a_list_of_names_and_numbers(text: str, plan: MemoryPlan) -> None:
    assert parse_memory_plan(text) == plan
