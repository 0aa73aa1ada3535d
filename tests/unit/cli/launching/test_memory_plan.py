"""`--memory-plan`: what it accepts, and the one line for what it refuses."""

from __future__ import annotations

import pytest

from grpo_run.cli.launching._values import parse_memory_plan
from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.plan import OPTION_NAMES, MemoryPlan


def test_a_plan_is_a_list_of_names_and_numbers() -> None:
    assert parse_memory_plan(None) == MemoryPlan()
    assert parse_memory_plan("micro-batch=2, checkpointing") == MemoryPlan(
        micro_batch_divisor=2, gradient_checkpointing=True
    )
    assert parse_memory_plan(
        "sub-batches=4,vllm-share=0.25,vllm-sleep,offload,expandable-segments"
    ) == MemoryPlan(
        generation_sub_batches=4,
        vllm_gpu_memory_utilization=0.25,
        vllm_sleep=True,
        optimizer_offload=True,
        expandable_segments=True,
    )


def test_the_names_are_fields_of_a_plan() -> None:
    assert set(OPTION_NAMES.values()) <= MemoryPlan.model_fields.keys()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "known: micro-batch"),
        ("micro-batch", "micro-batch=NUMBER"),
        ("micro-batches=2", "did you mean micro-batch?"),
        ("micro-batch=0", "greater than or equal to 1"),
        ("micro-batch=half", "integer"),
        ("checkpointing=yes", "checkpointing without a value"),
        ("micro-batch=2,micro-batch=4", "given twice"),
        ("vllm-share=1.5", "less than or equal to 1"),
        ("checkpointing,", "known"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_memory_plan(text)
    assert str(raised.value).startswith("--memory-plan ")
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)
