"""How a live trainer computes its model, as far as a memory trace depends on it, and which trainers are not
traced.

Called by `cli.planning`, whose process of a script asks the trainer with `computation_of`. What `refusals`
names is not covered: the figures would be those of another job. Changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pydantic

from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.planning.job import ALGORITHMS
from grpo_run.runtime.upstream import memory_names

UNCHANGING = ("auto_mapping", "peft_version", "fan_in_fan_out", "alpha_pattern")
"""Settings of `LoraConfig` that peft sets itself, or that change no size."""


class Computation(pydantic.BaseModel):
    """How a model is computed; empty where it is not known."""

    model_config = pydantic.ConfigDict(frozen=True)
    configuration: dict[str, Any] = {}
    """The model's configuration of transformers, as JSON."""
    weights: str = ""
    """Data type of the weights, such as `bfloat16`; with adapters that of the model below them."""
    attention: str = ""
    """Implementation in transformers: `sdpa`, `eager`, `flash_attention_2`."""
    optimizer: str = ""
    """Name of transformers' `optim`."""
    lora_rank: int = 0
    """Of peft's LoRA; 0 without adapters."""
    lora_targets: tuple[str, ...] = ()
    """Names of the modules that have adapters."""
    lora_dropout: float = 0.0
    special: tuple[str, ...] = ()
    """What a trace does not know, as clauses: adapters other than plain LoRA, quantized weights, kernels of
    Liger.
    """


def refusals(facts: MemoryFacts, computation: Computation) -> Iterator[str]:
    """Yield why a job cannot be traced, each as a clause; nothing if it can. Types, attention and optimizer
    are checked with the job, because options may replace them.

    Args:
        facts: of the `train()` call.
        computation: of its model.
    """
    if facts.trainer not in ALGORITHMS:
        yield f"{facts.trainer_class} is not traced, only GRPO, RLOO and SFT are"
    if facts.overridden:
        yield f"{facts.trainer_class} has its own {', '.join(facts.overridden)}"
    if not computation.configuration:
        yield "the model has no configuration of transformers"
    yield from computation.special
    if facts.optimizer_offload:
        yield "the optimizer's state is in host memory"


def computation_of(trainer: Any) -> Computation:
    """Return how a trainer computes its model; fields that it does not tell are empty."""
    args, model = trainer.args, getattr(trainer, "model", None)
    configuration: Any = getattr(model, "config", None)
    return Computation(
        configuration=_as_json(configuration),
        weights=_weights(model),
        attention=str(getattr(configuration, "_attn_implementation", None) or ""),
        optimizer=str(getattr(getattr(args, "optim", ""), "value", getattr(args, "optim", ""))),
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
    settings, *more = model.peft_config.values()
    plain_lora = type(settings).__name__ == "LoraConfig" and isinstance(settings.target_modules, (list, set))
    if more or not plain_lora:
        yield "adapters other than one LoRA with names of modules are not traced"
        return
    plain = type(settings)().to_dict()
    for name, value in settings.to_dict().items():
        if name not in memory_names.LORA_FOLLOWED and name not in UNCHANGING and value != plain.get(name):
            yield f"LoRA with {name} is not traced"


def _special(trainer: Any, model: Any) -> Iterator[str]:
    """Yield what a trace does not know, each as a clause."""
    args = trainer.args
    if hasattr(model, "peft_config"):
        yield from _adapters_refused(model)
    elif not all(one.requires_grad for one in getattr(model, "parameters", tuple)()):
        yield "frozen weights are not traced"
    for what, found in {
        "quantized weights": getattr(model, "quantization_method", None) is not None,
        "Liger's kernels": getattr(args, "use_liger_kernel", False),
        "compiled models": getattr(args, "torch_compile", False),
        "rows without padding": getattr(args, "packing", False) or getattr(trainer, "padding_free", False),
        "label smoothing": getattr(args, "label_smoothing_factor", 0.0),
        "images": hasattr(getattr(trainer, "processing_class", None), "image_processor"),
    }.items():
        if found:
            yield f"plan does not trace {what}"
