"""The memory plan: what it says, and what it refuses."""

from __future__ import annotations

import pydantic
import pytest

from grpo_run.runtime.memory.plan import MemoryPlan


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
