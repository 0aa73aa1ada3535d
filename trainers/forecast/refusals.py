"""Whether a trainer's rollouts have a forecast, and why its micro-batches cannot be split.

Called by `rollouts.py` when a call begins, before anything of the trainer is hooked. What makes several passes another update is
known to `runtime.continuity.memory.split_exactness`; here is what splitting within a step adds to that.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.continuity.memory.split_exactness import split_refusals
from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.trainers.memory_plan.facts import collect_facts
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.saving import description
from grpo_run.trainers.upstream import rollout_names, trainer_names, training_passes

FUSED_OPTIMIZERS = ("lomo", "layerwise")
"""Parts of the names of optimizers that take a step in each backward pass."""


def has_rollouts(trainer: Any) -> bool:
    """Whether a trainer generates as GRPO's and RLOO's do."""
    return rollout_names.leaves_out_nan(trainer) and hasattr(trainer, trainer_names.GENERATE)


def refusals(trainer: Any, session: Session, train_call: int) -> tuple[str, ...]:
    """Return why micro-batches of this trainer are not split within a step, each as a clause; empty if they may be."""
    layout = description.layout(trainer)
    reasons = []
    if layout != description.REPLICATED:
        reasons.append(f"the model is sharded ({layout})")
    try:
        facts = collect_facts(trainer, train_call, layout=layout, world_size=session.world_size)
    except (AttributeError, TypeError, ValueError) as error:  # pydantic's error is a ValueError
        return (*reasons, f"the trainer cannot be read: {error!r}")
    return (*reasons, *_of_the_update(facts), *_of_a_step(trainer))


def _of_the_update(facts: MemoryFacts) -> tuple[str, ...]:
    # sizes that the script sets elsewhere would contradict a plan, but not a split within a step
    return split_refusals(facts.model_copy(update={"explicit_sizes": ()}))


def _of_a_step(trainer: Any) -> list[str]:
    from transformers import ProcessorMixin

    reasons = []
    if isinstance(getattr(trainer, "processing_class", None), ProcessorMixin):
        reasons.append("the model takes images")
    if getattr(trainer.args, "n_gpu", 1) > 1:
        reasons.append("DataParallel divides the micro-batch")
    if getattr(trainer, training_passes.LOSS_IS_SCALED, None) is None:
        reasons.append("what the loss is divided by is not known")
    optimizer = str(getattr(trainer.args.optim, "value", trainer.args.optim)).lower()
    if any(part in optimizer for part in FUSED_OPTIMIZERS):
        reasons.append(f"{optimizer} takes a step in each backward pass")
    if _has_static_graph(trainer):
        reasons.append("DDP's static_graph fixes the number of passes")
    return reasons


def _has_static_graph(trainer: Any) -> bool:
    handler = getattr(trainer.accelerator, "ddp_handler", None)
    return bool(getattr(handler, "static_graph", False))
