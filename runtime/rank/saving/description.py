"""Describe a trainer's model, batch and layout, as manifests record them and resuming compares them.

Called at the start of a `train()` call, before the model is wrapped: wrapping casts, shards and renames
parameters, and checkpoints are described by the model that the script has built.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.checkpoints.compatibility import BatchGeometry, NamedShape, digest_model_shape

REPLICATED = "ddp"
"""The layout in which every rank holds the full state."""


def named_shapes(trainer: Any) -> tuple[NamedShape, ...]:
    """Return name, full shape and type of every parameter; empty if the trainer builds its model later."""
    model = getattr(trainer, "model", None)
    if model is None or not hasattr(model, "named_parameters"):
        return ()
    return tuple(
        # under ZeRO-3 a parameter is empty and its shape is in `ds_shape`
        (
            name,
            tuple(getattr(parameter, "ds_shape", parameter.shape)),
            str(parameter.dtype).rpartition(".")[2],
        )
        for name, parameter in model.named_parameters()
    )


def batch(trainer: Any, world_size: int) -> BatchGeometry | None:
    """Return how the samples of an optimizer step are spread over ranks; None if not known."""
    arguments = getattr(trainer, "args", None)
    per_device = getattr(arguments, "per_device_train_batch_size", None)
    accumulation = getattr(arguments, "gradient_accumulation_steps", None)
    if not isinstance(per_device, int) or not isinstance(accumulation, int):
        return None
    return BatchGeometry(ranks=world_size, per_device=per_device, accumulation=accumulation)


def layout(trainer: Any) -> str:
    """Return how state is spread over ranks.

    One of `ddp` (also for a single rank), `deepspeed-zero2`, `deepspeed-zero3`, `fsdp1`, `fsdp2`,
    `tensor-parallel`.
    """
    accelerator = getattr(trainer, "accelerator", None)
    if getattr(trainer, "is_deepspeed_enabled", False):
        plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
        return f"deepspeed-zero{getattr(plugin, 'zero_stage', '')}"
    if getattr(trainer, "is_fsdp_enabled", False):
        return "fsdp2" if getattr(accelerator, "is_fsdp2", False) else "fsdp1"
    return "tensor-parallel" if getattr(trainer, "is_tp_enabled", False) else REPLICATED


def manifest_fields(trainer: Any, world_size: int) -> dict[str, Any]:
    """Return the fields of `Identity` that describe the trainer."""
    spread, shapes = batch(trainer, world_size), named_shapes(trainer)
    return {
        "global_batch": spread.samples if spread else None,
        "per_device_train_batch_size": spread.per_device if spread else None,
        "gradient_accumulation_steps": spread.accumulation if spread else None,
        "layout": layout(trainer),
        "model_shape": digest_model_shape(shapes) if shapes else None,
    }


def file_bytes(trainer: Any) -> dict[str, int]:
    """Return about the size of a checkpoint's large files by name: weights, and two Adam moments per
    trained weight.

    Nothing if the trainer builds its model later. With adapters (PEFT), only trained weights are saved.
    Moments have the type of their weights; other optimizers need less or slightly more.
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
