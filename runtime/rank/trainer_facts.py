"""What is known of the trainer of a `train()` call: its kind, layout, batch and model, and how it generates.

Read once, when the call begins: before the model is wrapped, which casts, shards and renames parameters.
Checkpoints are described by the model that the script has built. Made by `hooks/train_call.py`, which passes
it to hooks, saving, resuming and features. Reads a trainer that lacks anything as one that does not have it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.checkpoints.compatibility import (
    BatchGeometry,
    NamedShape,
    digest_model_shape,
    named_shapes,
)
from grpo_run.runtime.memory.facts import Generator
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.features import LEAVING_ROWS, TOOLS, is_available
from grpo_run.runtime.upstream.trainer_kinds import TrainerKind, generates_rollouts, trainer_kind

REPLICATED = "ddp"
"""The layout in which every rank holds the full state."""
SHARDED = {"deepspeed-zero3": "ZeRO-3", "fsdp1": "FSDP", "fsdp2": "FSDP"}
"""Layouts in which every call of the model is collective, with their names for users."""


@dataclass(frozen=True, kw_only=True)
class TrainerFacts:
    """The facts of one trainer.

    Attributes:
        kind: whose loss it is.
        has_rollouts: it is GRPO's or RLOO's, or a subclass.
        rows_can_leave: the release can leave rows of a rollout out of baseline and loss.
        tools_available: the release has what the naming of tools needs.
        world_size: number of ranks.
        layout: how state is spread over ranks: `ddp` (also for a single rank), `deepspeed-zero2`,
            `deepspeed-zero3`, `fsdp1`, `fsdp2` or `tensor-parallel`.
        batch: how the samples of an optimizer step are spread over ranks; None if not known.
        shapes: name, full shape and type of every parameter; empty if the trainer builds its model later.
        file_bytes: about the sizes of a checkpoint's large files, by name; empty as `shapes`.
        generates: what generates rollouts; empty if nothing does.
        uses_vllm: the trainer is set to generate with vLLM.
        engine_sleeps: vLLM gives its memory back while the model trains.
        ranks_per_engine: ranks that share one vLLM engine in their processes, and so draw the same random
            numbers; 1 without one.
        max_completion_length: in tokens; None for a trainer that does not say.
        has_tools: the model calls tools of the script.
    """

    kind: TrainerKind
    has_rollouts: bool
    rows_can_leave: bool
    tools_available: bool
    world_size: int
    layout: str
    batch: BatchGeometry | None
    shapes: tuple[NamedShape, ...]
    file_bytes: Mapping[str, int]
    generates: Generator
    uses_vllm: bool
    engine_sleeps: bool
    ranks_per_engine: int
    max_completion_length: int | None
    has_tools: bool

    @classmethod
    def of(cls, trainer: Any, world_size: int) -> TrainerFacts:
        """Read the facts of a trainer."""
        args = getattr(trainer, "args", None)
        model: Any = getattr(trainer, "model", None)
        uses_vllm = bool(getattr(args, "use_vllm", False))
        in_process = uses_vllm and getattr(args, "vllm_mode", "") == "colocate"
        return cls(
            kind=trainer_kind(type(trainer))[0],
            has_rollouts=generates_rollouts(trainer),
            rows_can_leave=is_available(LEAVING_ROWS, trainer),
            tools_available=is_available(TOOLS, trainer),
            world_size=world_size,
            layout=_layout(trainer),
            batch=_batch(args, world_size),
            shapes=named_shapes(model.named_parameters()) if hasattr(model, "named_parameters") else (),
            file_bytes=_file_bytes(trainer),
            generates=_generates(trainer),
            uses_vllm=uses_vllm,
            engine_sleeps=uses_vllm and bool(getattr(args, "vllm_enable_sleep_mode", False)),
            ranks_per_engine=int(getattr(args, "vllm_tensor_parallel_size", 1) or 1) if in_process else 1,
            max_completion_length=getattr(args, "max_completion_length", None) or None,
            has_tools=bool(getattr(trainer, "tools", None)),
        )

    @property
    def is_sharded(self) -> bool:
        """Whether no rank holds the full state."""
        return self.layout != REPLICATED

    @property
    def manifest_fields(self) -> dict[str, Any]:
        """The fields of `Identity` that describe the trainer."""
        return {
            "global_batch": self.batch.samples if self.batch else None,
            "per_device_train_batch_size": self.batch.per_device if self.batch else None,
            "gradient_accumulation_steps": self.batch.accumulation if self.batch else None,
            "layout": self.layout,
            "model_shape": digest_model_shape(self.shapes) if self.shapes else None,
        }


def _batch(args: Any, world_size: int) -> BatchGeometry | None:
    per_device = getattr(args, "per_device_train_batch_size", None)
    accumulation = getattr(args, "gradient_accumulation_steps", None)
    if not isinstance(per_device, int) or not isinstance(accumulation, int):
        return None
    return BatchGeometry(ranks=world_size, per_device=per_device, accumulation=accumulation)


def _layout(trainer: Any) -> str:
    accelerator = getattr(trainer, "accelerator", None)
    if getattr(trainer, "is_deepspeed_enabled", False):
        plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
        return f"deepspeed-zero{getattr(plugin, 'zero_stage', '')}"
    if getattr(trainer, "is_fsdp_enabled", False):
        return "fsdp2" if getattr(accelerator, "is_fsdp2", False) else "fsdp1"
    return "tensor-parallel" if getattr(trainer, "is_tp_enabled", False) else REPLICATED


def _file_bytes(trainer: Any) -> dict[str, int]:
    """Return the sizes of weights, and of two Adam moments per trained weight.

    With adapters (PEFT), only trained weights are saved. Moments have the type of their weights; other
    optimizers need less or slightly more.
    """
    model = getattr(trainer, "model", None)
    if model is None or not hasattr(model, "parameters"):
        return {}
    adapters = hasattr(model, "peft_config")
    trained = weights = 0
    for parameter in model.parameters():
        size_bytes = getattr(parameter, "ds_numel", parameter.numel()) * parameter.element_size()
        trained += size_bytes if parameter.requires_grad else 0
        weights += size_bytes if parameter.requires_grad or not adapters else 0
    return {
        "adapter_model.safetensors" if adapters else "model.safetensors": weights,
        "optimizer.pt": 2 * trained,
    }


def _generates(trainer: Any) -> Generator:
    args = getattr(trainer, "args", None)
    if not hasattr(trainer, trainer_names.GENERATE):
        return ""
    if getattr(trainer, "rollout_func", None) is not None:
        return "script"
    if getattr(args, "use_vllm", False):
        return "vllm_server" if getattr(args, "vllm_mode", "") == "server" else "vllm_colocate"
    if getattr(args, "use_transformers_continuous_batching", False):
        return "continuous_batching"
    return "transformers"
