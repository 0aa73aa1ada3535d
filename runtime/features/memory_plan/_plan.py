"""The memory plan of a run: what is changed so that the next attempt needs less memory, for the same update.

Chosen after an out-of-memory error, or by the user (`--memory-plan`), and applied to the configuration of
trainers. The default changes nothing. The values are absolute: they are applied to what the script itself has
set, never to what an earlier plan has made of it. A field has its name of the option, and its help. Plain
data.
"""

from __future__ import annotations

from typing import Any

import pydantic


def _field(default: Any, option: str = "", does: str = "", **bounds: Any) -> Any:
    """Return a field.

    Args:
        option: its name of `--memory-plan`; empty if the user cannot set it.
        does: what it does, for the help; empty if the name says it.
    """
    return pydantic.Field(
        default=default, json_schema_extra={"option": option}, description=does or None, **bounds
    )


class MemoryPlan(pydantic.BaseModel):
    """What is changed to lower the peak of memory; every field is at its default if it is not changed."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    micro_batch_divisor: int = _field(
        1, "micro-batch",
        "micro-batch=N divides per_device_train_batch_size and multiplies gradient_accumulation_steps", ge=1,
    )  # fmt: skip
    """`steps_per_generation` is multiplied, too."""
    generation_sub_batches: int = _field(1, "sub-batches", "sub-batches=N splits calls of generation", ge=1)
    gradient_checkpointing: bool = _field(
        False, "checkpointing", "checkpointing turns on gradient checkpointing"
    )
    optimizer_offload: bool = _field(False, "offload", "offload moves DeepSpeed's optimizer to host memory")
    expandable_segments: bool = _field(False, "expandable-segments")
    """Of torch's allocator; set by the supervisor in the ranks' environment."""
    vllm_gpu_memory_utilization: float | None = _field(None, "vllm-share", "vllm-share=SHARE", gt=0.0, le=1.0)
    """Share of a GPU that vLLM may use; None keeps the script's."""
    vllm_sleep: bool = _field(False, "vllm-sleep")
    """Whether vLLM frees its memory while the model is trained."""
    max_completion_length: int | None = _field(None, ge=1)
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
        named = {OPTION_OF.get(field, field): value for field, value in changed.items()}
        return ",".join(name if value is True else f"{name}={value}" for name, value in named.items())


OPTION_OF = {
    field: str(extra["option"])
    for field, info in MemoryPlan.model_fields.items()
    if isinstance(extra := info.json_schema_extra, dict) and extra["option"]
}
"""By field, its name of the option."""
