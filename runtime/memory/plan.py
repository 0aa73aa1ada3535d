"""The memory plan of a run: what is changed so that the next attempt needs less memory, for the same update.

Chosen after an out-of-memory error, or by the user (`--memory-plan`), and applied to the configuration of
trainers. The default changes nothing. The values are absolute: they are applied to what the script itself has
set, never to what an earlier plan has made of it. Plain data.
"""

from __future__ import annotations

import pydantic

OPTION_NAMES = {
    "micro-batch": "micro_batch_divisor",
    "sub-batches": "generation_sub_batches",
    "checkpointing": "gradient_checkpointing",
    "offload": "optimizer_offload",
    "expandable-segments": "expandable_segments",
    "vllm-share": "vllm_gpu_memory_utilization",
    "vllm-sleep": "vllm_sleep",
}
"""Names of `--memory-plan`, and the fields of a plan."""
_NAMES_OF_FIELDS = {field: name for name, field in OPTION_NAMES.items()}


class MemoryPlan(pydantic.BaseModel):
    """What is changed to lower the peak of memory; every field is at its default if it is not changed."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    micro_batch_divisor: int = pydantic.Field(default=1, ge=1)
    """`per_device_train_batch_size` is divided by it; `gradient_accumulation_steps` and
    `steps_per_generation` are multiplied.
    """
    generation_sub_batches: int = pydantic.Field(default=1, ge=1)
    """Into how many parts a call of generation is split."""
    gradient_checkpointing: bool = False
    """Whether gradient checkpointing is turned on."""
    optimizer_offload: bool = False
    """Whether DeepSpeed keeps the optimizer's state in host memory."""
    expandable_segments: bool = False
    """Whether the allocator uses expandable segments; set by the supervisor in the ranks' environment."""
    vllm_gpu_memory_utilization: float | None = pydantic.Field(default=None, gt=0.0, le=1.0)
    """Share of a GPU that vLLM may use; None keeps the script's."""
    vllm_sleep: bool = False
    """Whether vLLM frees its memory while the model is trained."""
    max_completion_length: int | None = pydantic.Field(default=None, ge=1)
    """Longest completion in tokens, which changes the experiment (`--allow-degrade`); None keeps the
    script's.
    """

    @property
    def changed(self) -> bool:
        """Whether it changes anything."""
        return self != MemoryPlan()

    @property
    def text(self) -> str:
        """What is changed, as `--memory-plan` has it, such as `micro-batch=2,checkpointing`; empty if nothing
        is.
        """
        changed = self.model_dump(exclude_defaults=True)
        named = {_NAMES_OF_FIELDS.get(field, field): value for field, value in changed.items()}
        return ",".join(name if value is True else f"{name}={value}" for name, value in named.items())
