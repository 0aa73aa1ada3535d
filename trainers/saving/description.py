"""What a trainer's manifest says of its model and of how state and batch are spread over ranks.

Looked at when a `train()` call begins, before the model is wrapped: wrapping casts, cuts and renames parameters, so
what is saved and what is resumed are both described as the script had built them. Called by the guard.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.checkpoints.compatibility import Batch, NamedShape, digest_model_shape


def named_shapes(trainer: Any) -> tuple[NamedShape, ...]:
    """Name, whole shape and type of every parameter; empty when the trainer builds its model later."""
    model = getattr(trainer, "model", None)
    if model is None or not hasattr(model, "named_parameters"):
        return ()
    return tuple(
        # under ZeRO-3 a parameter is empty from its birth and keeps its shape aside
        (
            name,
            tuple(getattr(parameter, "ds_shape", parameter.shape)),
            str(parameter.dtype).rpartition(".")[2],
        )
        for name, parameter in model.named_parameters()
    )


def batch(trainer: Any, world_size: int) -> Batch | None:
    """How an optimizer step's samples are spread; None when the trainer's arguments do not say."""
    arguments = getattr(trainer, "args", None)
    per_device = getattr(arguments, "per_device_train_batch_size", None)
    accumulation = getattr(arguments, "gradient_accumulation_steps", None)
    if not isinstance(per_device, int) or not isinstance(accumulation, int):
        return None
    return Batch(ranks=world_size, per_device=per_device, accumulation=accumulation)


def layout(trainer: Any) -> str:
    """`ddp` (also for a single rank), `deepspeed-zero2`, `fsdp1`, `fsdp2` or `tensor-parallel`."""
    accelerator = getattr(trainer, "accelerator", None)
    if getattr(trainer, "is_deepspeed_enabled", False):
        plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
        return f"deepspeed-zero{getattr(plugin, 'zero_stage', '')}"
    if getattr(trainer, "is_fsdp_enabled", False):
        return "fsdp2" if getattr(accelerator, "is_fsdp2", False) else "fsdp1"
    return "tensor-parallel" if getattr(trainer, "is_tp_enabled", False) else "ddp"


def manifest_fields(trainer: Any, world_size: int) -> dict[str, Any]:
    """What `checkpoints.Identity` takes of it; to be kept from the beginning of a call to its saves."""
    spread, shapes = batch(trainer, world_size), named_shapes(trainer)
    return {
        "global_batch": spread.samples if spread else None,
        "per_device_train_batch_size": spread.per_device if spread else None,
        "gradient_accumulation_steps": spread.accumulation if spread else None,
        "layout": layout(trainer),
        "model_shape": digest_model_shape(shapes) if shapes else None,
    }


def checkpoint_bytes(trainer: Any) -> int:
    """About how large a whole checkpoint will be: the weights, and two more of each trained one for Adam.

    0 when the trainer builds its model later. Of a model with adapters (PEFT) only what is trained is saved.
    Half-precision weights keep their moments in their own type; other optimizers take less or little more.
    """
    model = getattr(trainer, "model", None)
    if model is None or not hasattr(model, "parameters"):
        return 0
    adapters = hasattr(model, "peft_config")
    return sum(
        getattr(parameter, "ds_numel", parameter.numel())
        * parameter.element_size()
        * (3 if parameter.requires_grad else int(not adapters))
        for parameter in model.parameters()
    )
