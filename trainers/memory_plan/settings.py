"""Facts about loss and batch from a configuration alone, and why its micro-batch must not be divided.

Called by `configuration.py`, where there is no trainer yet, and by `facts.py`. A script with several stages has one plan: the
stage that ran out of memory may be split, and another may have a loss that may not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from grpo_run.runtime.continuity.memory.split_exactness import split_refusals
from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.trainers.memory_plan import deepspeed

TrainerKind = Literal["grpo", "rloo", "sft", "transformers", "other"]
CONFIGURATIONS: Mapping[tuple[str, str], TrainerKind] = {
    ("trl.trainer.grpo_config", "GRPOConfig"): "grpo",
    ("trl.trainer.rloo_config", "RLOOConfig"): "rloo",
    ("trl.trainer.sft_config", "SFTConfig"): "sft",
    ("transformers.training_args", "TrainingArguments"): "transformers",
}


def settings_of(arguments: Any) -> dict[str, Any]:
    """Return the fields of `MemoryFacts` that depend on a trainer's arguments alone."""
    loss_type = getattr(arguments, "loss_type", None)
    return {
        "drop_last": bool(getattr(arguments, "dataloader_drop_last", False)),
        "explicit_sizes": tuple(_explicit_sizes(arguments)),
        "loss_type": loss_type if loss_type is None or isinstance(loss_type, str) else str(loss_type),
        "beta": float(getattr(arguments, "beta", 0.0) or 0.0),
        "entropy_bonus": bool(
            getattr(arguments, "entropy_coef", 0.0) or getattr(arguments, "use_adaptive_entropy", False)
        ),
        "top_entropy_quantile": float(getattr(arguments, "top_entropy_quantile", 1.0)),
        "averages_tokens_across_ranks": bool(getattr(arguments, "average_tokens_across_devices", True)),
    }


def why_not_divided(arguments: Any) -> str:
    """Return why the micro-batch of a configuration is not to be divided, as a clause; empty if it may be.

    Args:
        arguments: the configuration, which may not have validated itself yet.
    """
    facts = MemoryFacts(
        train_call=1,
        trainer_class=type(arguments).__name__,
        trainer=_kind(type(arguments)),
        world_size=1,
        layout="",
        per_device_train_batch_size=max(1, arguments.per_device_train_batch_size),
        gradient_accumulation_steps=max(1, arguments.gradient_accumulation_steps),
        counts_tokens=True,  # only the trainer knows
        **settings_of(arguments),
    )
    return "; ".join(split_refusals(facts))


def _kind(arguments_class: type) -> TrainerKind:
    """Return whose configuration it is; another one of TRL is no `TrainingArguments` as it is."""
    for base in arguments_class.__mro__:
        kind = CONFIGURATIONS.get((base.__module__, base.__name__))
        if kind is not None:
            return kind
        if f"{base.__module__}.".startswith("trl."):
            return "other"
    return "other"


def _explicit_sizes(arguments: Any) -> Iterator[str]:
    """Yield the settings, beside the arguments' own, that fix the sizes of a batch."""
    yield from deepspeed.explicit_sizes(arguments)
    accelerator = getattr(arguments, "accelerator_config", None)
    if isinstance(accelerator, Mapping):  # before it is validated
        keywords = accelerator.get("gradient_accumulation_kwargs")
    else:
        keywords = getattr(accelerator, "gradient_accumulation_kwargs", None)
    if (keywords or {}).get("num_steps") is not None:
        yield "num_steps in accelerator_config"
    if getattr(arguments, "auto_find_batch_size", False):
        yield "auto_find_batch_size"
