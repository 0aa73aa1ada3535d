"""Facts and memory plans of runs that tests share."""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.memory.facts import MemoryFacts

_SIZES: dict[str, Any] = {
    "trainer_class": "GRPOTrainer",
    "world_size": 2,
    "layout": "ddp",
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "samples": 64,
    "supports_gradient_checkpointing": True,
}
GRPO = MemoryFacts(
    **_SIZES,
    trainer="grpo",
    loss_type="dapo",
    generates="transformers",
    steps_per_generation=1,
    generation_batch_size=16,
    max_completion_length=512,
)
SFT = MemoryFacts(
    **(_SIZES | {"trainer_class": "SFTTrainer"}),
    trainer="sft",
    loss_type="nll",
    counts_tokens=True,
    max_length=1024,
)
COLOCATED = {"generates": "vllm_colocate", "vllm_gpu_memory_utilization": 0.3}


def facts(base: MemoryFacts = GRPO, **changed: Any) -> MemoryFacts:
    """Return facts with some of them changed."""
    return base.model_copy(update=changed)


def planned(**changed: Any) -> dict[str, Any]:
    """Return the memory plan that changes these fields."""
    return changed
