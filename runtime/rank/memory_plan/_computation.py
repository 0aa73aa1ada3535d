"""How a trainer runs its model, as far as a memory trace depends on it.

A part of the facts of a call (`facts.py`): after an out-of-memory error the supervisor has the job traced
with other plans (`runtime.planning`). Changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grpo_run.runtime.memory.facts import Computation
from grpo_run.runtime.upstream import memory_names

UNCHANGING = ("auto_mapping", "peft_version", "fan_in_fan_out", "alpha_pattern")
"""Settings of `LoraConfig` that peft sets itself, or that change no size."""


def computation_of(trainer: Any) -> Computation:
    """Return how a trainer computes its model; fields that it does not tell are empty."""
    args, model = trainer.args, getattr(trainer, "model", None)
    configuration: Any = getattr(model, "config", None)
    return Computation(
        configuration=_as_json(configuration),
        weights=_weights(model),
        autocast="bfloat16"
        if getattr(args, "bf16", False)
        else "float16"
        if getattr(args, "fp16", False)
        else "",
        attention=str(getattr(configuration, "_attn_implementation", None) or ""),
        optimizer=str(getattr(getattr(args, "optim", ""), "value", getattr(args, "optim", ""))),
        device=str(getattr(getattr(args, "device", None), "type", "")),
        special=tuple(_special(trainer, model)),
        **_adapters(model),
    )


def _as_json(configuration: Any) -> dict[str, Any]:
    if not hasattr(configuration, "to_json_string"):
        return {}
    values = json.loads(configuration.to_json_string(use_diff=False))
    return values if isinstance(values, dict) else {}


def _weights(model: Any) -> str:
    """Return the data type of the parameters, as in `torch.<name>`; empty if they have several.

    Those of adapters, which are trained, do not count.
    """
    if not hasattr(model, "parameters"):
        return ""
    adapted = hasattr(model, "peft_config")
    weights = (one for one in model.parameters() if not (adapted and one.requires_grad))
    kinds = {str(one.dtype).removeprefix("torch.") for one in weights}
    return kinds.pop() if len(kinds) == 1 else ""


def _adapters(model: Any) -> dict[str, Any]:
    """Return rank, modules and dropout of plain LoRA; nothing without adapters, or for others."""
    if not hasattr(model, "peft_config") or any(_adapters_refused(model)):
        return {}
    (settings,) = model.peft_config.values()
    return {
        "lora_rank": settings.r,
        "lora_targets": tuple(sorted(settings.target_modules)),
        "lora_dropout": settings.lora_dropout,
    }


def _adapters_refused(model: Any) -> Iterator[str]:
    """Yield why the adapters of a model are not traced, each as a clause."""
    if len(model.peft_config) != 1:
        yield "several adapters are not traced"
        return
    (settings,) = model.peft_config.values()
    if type(settings).__name__ != "LoraConfig":
        yield f"adapters of {type(settings).__name__} are not traced"
        return
    if isinstance(settings.target_modules, str) or not settings.target_modules:
        yield "adapters that a pattern chooses are not traced"
    plain = type(settings)().to_dict()
    for name, value in settings.to_dict().items():
        if name not in memory_names.LORA_FOLLOWED and name not in UNCHANGING and value != plain.get(name):
            yield f"LoRA with {name} is not traced"


def _special(trainer: Any, model: Any) -> Iterator[str]:
    """Yield what a trace does not know, each as a clause."""
    args = trainer.args
    if hasattr(model, "peft_config"):
        yield from _adapters_refused(model)
    if getattr(model, "quantization_method", None) is not None:
        yield "quantized weights are not traced"
    if getattr(args, "use_liger_kernel", False):
        yield "Liger's kernels are not traced"
    if getattr(args, "torch_compile", False):
        yield "compiled models are not traced"
    if getattr(args, "packing", False) or getattr(trainer, "padding_free", False):
        yield "rows without padding are not traced"
    if getattr(args, "label_smoothing_factor", 0.0):
        yield "label smoothing is not traced"
    if getattr(trainer, "processing_class", None) is not None and hasattr(
        trainer.processing_class, "image_processor"
    ):
        yield "images are not traced"
