"""Which job a run is, from the facts that its ranks have published, and why some runs cannot be traced.

Called by `worker.py`. Loads no weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from grpo_run.runtime.continuity.memory.closed_form import Sizes
from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.planning.job import ALGORITHMS, ATTENTIONS, DTYPE_BYTES, OPTIMIZERS, Job
from grpo_run.trainers.planning.model_config import build_config

LAYOUTS = {
    "ddp": "ddp",
    "deepspeed-zero2": "zero2",
    "deepspeed-zero3": "zero3",
    "fsdp1": "fsdp",
    "fsdp2": "fsdp",
}
"""Layouts of a manifest, and the job's names for them."""
AUTOCAST = ("", "bfloat16")
DEVICES = ("cuda", "cpu")
OTHER_PARAMETERS = 0.01
"""Share of the parameters by which the model may differ from what its configuration describes."""


def refusals(facts: MemoryFacts) -> Iterator[str]:
    """Yield why a run cannot be traced, each as a clause; nothing if it can."""
    computation, model = facts.computation, facts.model
    if facts.trainer not in ALGORITHMS:
        yield f"{facts.trainer_class} is not traced, only GRPO, RLOO and SFT are"
    if facts.trainer == "sft" and facts.max_length is None:
        yield "its rows have no longest length"
    if facts.overridden:
        yield f"{facts.trainer_class} has its own {', '.join(facts.overridden)}"
    if not computation.configuration:
        yield "the model has no configuration of transformers"
    if model.trainable_parameters != model.parameters and not computation.lora_rank:
        yield "not all parameters are trained"
    yield from computation.special
    for name, value, known in (
        ("data type", computation.weights, tuple(DTYPE_BYTES)),
        ("data type of autocast", computation.autocast, AUTOCAST),
        ("attention", computation.attention, ATTENTIONS),
        ("optimizer", computation.optimizer, OPTIMIZERS),
        ("device", computation.device, DEVICES),
        ("layout", facts.layout, tuple(LAYOUTS)),
    ):
        if value not in known:
            yield f"the {name} {value!r} is not traced"
    if facts.optimizer_offload:
        yield "the optimizer's state is in host memory"


def job_of(facts: MemoryFacts, sizes: Sizes) -> Job:
    """Return the job of a run that can be traced.

    Args:
        facts: of the run, without refusals.
        sizes: with the plan.
    """
    computation = facts.computation
    steps = facts.steps_per_generation or facts.gradient_accumulation_steps
    rollout_steps = steps * (facts.num_iterations or 1)
    adapted, reinforced = computation.lora_rank > 0, facts.trainer != "sft"
    rescored = (
        facts.trainer == "rloo"
        or facts.generates.startswith("vllm")
        or facts.gradient_accumulation_steps % rollout_steps != 0
    )
    return Job(
        batch=sizes.rows,
        prompt=sizes.row_tokens - sizes.scored_tokens,
        completion=sizes.scored_tokens,
        weights=computation.weights,
        autocast=bool(computation.autocast),
        checkpointing=sizes.checkpointing,
        optimizer=computation.optimizer,
        # under adapters the reference is the model without them
        reference=reinforced and (facts.reference_model or (adapted and facts.beta != 0.0)),
        rescored=reinforced and rescored,
        accumulation=2 if sizes.accumulates else 1,
        ranks=facts.world_size,
        layout=LAYOUTS[facts.layout],
        attention=computation.attention,
        device=computation.device,
        algorithm=facts.trainer,
        lora_rank=computation.lora_rank,
        lora_targets=computation.lora_targets,
        lora_dropout=computation.lora_dropout,
    )


def other_parameters(facts: MemoryFacts, described: int, trained: int) -> str:
    """Return that a run has other parameters than were traced, as a clause; empty if it has them.

    Args:
        facts: of the run.
        described: parameters of the model that its configuration describes.
        trained: parameters that were trained in the trace.
    """
    model = facts.model
    pairs = [("", model.parameters, described)]
    if facts.computation.lora_rank:
        pairs = [
            ("below its adapters", model.parameters - model.trainable_parameters, described),
            ("in its adapters", model.trainable_parameters, trained),
        ]
    for where, real, found in pairs:
        if abs(found - real) > OTHER_PARAMETERS * real:
            return (
                f"the model has {real} parameters{where and ' ' + where}, its configuration describes {found}"
            )
    return ""


def model_config(facts: MemoryFacts) -> Any:
    """Return transformers' configuration of the run's model.

    Raises:
        ConfigError: it is that of no model that transformers has.
    """
    values = facts.computation.configuration
    if not isinstance(values.get("model_type"), str):
        raise ConfigError("the model's configuration has no model_type")
    return build_config(values, "the model's configuration")
