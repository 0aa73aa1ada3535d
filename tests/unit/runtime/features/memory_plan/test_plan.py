"""The memory plan: what it says, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory_cases import planned

from grpo_run.runtime.features.memory_plan._remedies import read_plan, text_of


def test_the_text_names_what_is_changed_only() -> None:
    assert text_of({}) == ""
    plan = planned(micro_batch_divisor=4, gradient_checkpointing=True)
    assert text_of(read_plan({**plan, "vllm_sleep": False})) == "micro-batch=4,checkpointing"


@pytest.mark.parametrize(
    "values",
    [
        planned(micro_batch_divisor=0),
        planned(generation_sub_batches=0),
        planned(vllm_gpu_memory_utilization=1.5),
        planned(no_such_field=1),
    ],
)
def test_a_plan_that_no_run_can_have_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no_such_field|should be"):
        read_plan(values)
