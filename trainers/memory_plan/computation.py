"""How a trainer computes its model, as far as a trace of its memory depends on that.

A part of the facts of a call (`facts.py`): after an out-of-memory error the supervisor has the job traced with other plans
(`trainers.planning.plans`). Changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from grpo_run.runtime.continuity.memory_facts import Computation

MAX_CONFIGURATION_CHARACTERS = 1 << 17
"""A longer configuration, with a table of a whole vocabulary for example, is left out."""


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
    )


def _as_json(configuration: Any) -> dict[str, Any]:
    if not hasattr(configuration, "to_json_string"):
        return {}
    text = configuration.to_json_string(use_diff=False)
    if len(text) > MAX_CONFIGURATION_CHARACTERS:
        return {}
    values = json.loads(text)
    return values if isinstance(values, dict) else {}


def _weights(model: Any) -> str:
    """Return the data type of the parameters, as in `torch.<name>`; empty if they have several."""
    if not hasattr(model, "parameters"):
        return ""
    kinds = {str(one.dtype).removeprefix("torch.") for one in model.parameters()}
    return kinds.pop() if len(kinds) == 1 else ""


def _special(trainer: Any, model: Any) -> Iterator[str]:
    """Yield what a trace does not know, each as a clause."""
    args = trainer.args
    if hasattr(model, "peft_config"):
        yield "adapters are not traced"
    if getattr(model, "quantization_method", None) is not None:
        yield "quantized weights are not traced"
    if getattr(args, "use_liger_kernel", False):
        yield "Liger's kernels are not traced"
    if getattr(args, "torch_compile", False):
        yield "compiled models are not traced"
    if getattr(trainer, "processing_class", None) is not None and hasattr(
        trainer.processing_class, "image_processor"
    ):
        yield "images are not traced"
