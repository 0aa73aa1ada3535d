"""Collect the facts of a `train()` call that decide how it could use less memory, and publish them for the
supervisor.

Called by `runtime/rank/hooks/train_call.py` when a call begins, before anything of the trainer is hooked.
After an out-of-memory error no rank is left to ask, so the facts are in the run directory
(`runtime.memory.facts`). Changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

from grpo_run.runtime.memory.facts import MemoryFacts, split_refusals
from grpo_run.runtime.memory.files import write_facts
from grpo_run.runtime.memory.script_settings import record_of, set_later, settings_of
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream import trainer_names
from grpo_run.runtime.upstream.features import DIVISION, is_available
from grpo_run.runtime.upstream.trainer_kinds import TrainerKind, trainer_kind

CAUSAL = "ForCausalLM"
"""End of the names of transformers' language models."""


def publish_facts(trainer: Any, known: TrainerFacts, session: Session) -> None:
    """Write the facts of a call that begins into the run directory, on the first rank of each node.

    A trainer that is like no other, or a full disk, loses them, with a note in the journal: without them no
    plan can be chosen. A warning says that the plan has
    divided a micro-batch whose update is not the same then, which only the trainer shows.

    Args:
        known: of the trainer, whatever its memory.
    """
    if session.rank % session.local_world_size != 0:
        return
    try:
        facts = collect_facts(trainer, known)
        divided = record_of(trainer.args).divided_by > 1
    except (AttributeError, TypeError, ValueError) as error:  # pydantic's error is a ValueError
        session.warn_in_journal(
            f"what the run's memory depends on cannot be read from the trainer: {error!r}"
        )
        return
    if divided and (reasons := split_refusals(facts)):
        session.warn(
            f"the memory plan divides the micro-batch of {facts.trainer_class}, whose update is not the same"
            f" then: {'; '.join(reasons)}"
        )
    try:
        write_facts(session.config.run_directory, facts)
    except OSError as error:
        session.warn_in_journal(f"what the run's memory depends on cannot be written: {error}")


def collect_facts(trainer: Any, known: TrainerFacts) -> MemoryFacts:
    """Return what the memory of a trainer depends on.

    Args:
        known: of the trainer, whatever its memory.
    """
    args, model = trainer.args, getattr(trainer, "model", None)
    record = record_of(args)
    steps = getattr(args, "steps_per_generation", None)
    settings = settings_of(args)
    sizes_later, checkpointing_later = set_later(args)
    if sizes_later:
        settings["explicit_sizes"] += (sizes_later.format(trainer=type(trainer).__name__),)
    plugin = _deepspeed_plugin(trainer)
    dataset = getattr(trainer, "train_dataset", None)
    return MemoryFacts(
        trainer_class=type(trainer).__qualname__,
        trainer=known.kind,
        overridden=tuple(_overridden(trainer)),
        world_size=known.world_size,
        layout=known.layout,
        per_device_train_batch_size=record.per_device_train_batch_size,
        gradient_accumulation_steps=record.gradient_accumulation_steps,
        steps_per_generation=steps // record.divided_by if isinstance(steps, int) else None,
        generation_batch_size=getattr(args, "generation_batch_size", None),
        max_completion_length=known.max_completion_length,
        max_length=getattr(args, "max_length", None),
        samples=len(dataset) if isinstance(dataset, Sized) else None,
        **settings,
        auxiliary_loss=_has_auxiliary_loss(trainer),
        dropout=_has_dropout(model),
        counts_tokens=_counts_tokens(trainer, known.kind),
        generates=known.generates,
        greedy=(getattr(args, "generation_kwargs", None) or {}).get("do_sample") is False,
        vllm_gpu_memory_utilization=getattr(args, "vllm_gpu_memory_utilization", None),
        vllm_sleep=bool(getattr(args, "vllm_enable_sleep_mode", False)),
        vllm_wakes_with_weights=hasattr(
            getattr(trainer, trainer_names.ENGINE, None), trainer_names.WEIGHTS_SLEEP
        ),
        gradient_checkpointing=record.gradient_checkpointing,
        checkpointing_set_later=checkpointing_later,
        supports_gradient_checkpointing=bool(getattr(model, "supports_gradient_checkpointing", False)),
        optimizer_offload=_offloads_optimizer(plugin),
        deepspeed=plugin is not None,
    )


def _overridden(trainer: Any) -> Iterator[str]:
    """Yield what of a library's trainer a script replaces, in a subclass or on the object.

    Also a method that passes on what the trainer's own returns: no look at it could tell that it changes
    nothing.
    """
    _, base = trainer_kind(type(trainer))
    if base is None:
        return
    classes = type(trainer).__mro__[: type(trainer).__mro__.index(base)]
    for name in trainer_names.LOSS_METHODS:
        if any(name in vars(one) for one in (trainer, *classes)):
            yield name
    if callable(getattr(trainer, "compute_loss_func", None)):  # GRPO before TRL 1.15 has a text there
        yield "compute_loss_func"
    if not is_available(DIVISION, trainer):
        yield trainer_names.MICRO_STEP


def _counts_tokens(trainer: Any, kind: TrainerKind) -> bool:
    """Whether the loss is divided by the tokens of the whole step.

    transformers takes any model that accepts further keywords for one that does so. Its language models do;
    a model of the script's own, or one that classifies, may take the mean over each micro-batch all the same.
    """
    if not getattr(trainer, "model_accepts_loss_kwargs", False):
        return False
    if kind != "transformers":
        return True  # SFTTrainer divides itself
    model: Any = trainer.model
    model = type(model.get_base_model() if hasattr(model, "peft_config") else model)
    return f"{model.__module__}.".startswith("transformers.") and model.__name__.endswith(CAUSAL)


def _deepspeed_plugin(trainer: Any) -> Any | None:
    if not getattr(trainer, "is_deepspeed_enabled", False):
        return None
    return getattr(trainer.accelerator.state, "deepspeed_plugin", None)


def _offloads_optimizer(plugin: Any | None) -> bool:
    if plugin is None:
        return False
    configuration = getattr(plugin, "deepspeed_config", None) or {}
    offload = (configuration.get("zero_optimization") or {}).get("offload_optimizer") or {}
    return offload.get("device", "none") not in (None, "none")


def _has_auxiliary_loss(trainer: Any) -> bool:
    """Whether a mixture of experts adds a loss; TRL's trainers know, of others the model's configuration
    says.
    """
    enabled = getattr(trainer, "aux_loss_enabled", None)
    if enabled is None:
        configuration = getattr(getattr(trainer, "model", None), "config", None)
        return bool(getattr(configuration, "output_router_logits", False))
    return bool(enabled)


def _has_dropout(model: Any) -> bool:
    """Whether training draws random numbers for dropout, in a module or in attention."""
    if getattr(getattr(model, "config", None), "attention_dropout", 0.0):
        return True
    modules = model.modules() if hasattr(model, "modules") else ()
    return any("Dropout" in type(one).__name__ and getattr(one, "p", 0.0) > 0.0 for one in modules)
