"""Whether smaller micro-batches, accumulated over more of them, give the same update: for which losses, and why not for others.

The sums of gradients are the same up to rounding if each micro-batch of a step has the same weight, or if the loss is divided by
a number that belongs to the whole step. The ladder of memory plans refuses a split where they are not; tests train each loss both
ways (`tests/fault/test_memory_plans.py`). Pure. Reads TRL 1.16.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_run.runtime.continuity.memory_facts import MemoryFacts

EXACT_GRPO_LOSSES = frozenset({"grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"})
"""Values of GRPO's `loss_type`: means over samples, and sums divided by the tokens of the whole rollout."""
INEXACT_GRPO_LOSSES: Mapping[str, str] = {
    "bnpo": "loss_type='bnpo' divides by the tokens of each micro-batch",
}
EXACT_SFT_LOSSES = frozenset({"nll", "dft", "chunked_nll"})
"""Values of SFT's `loss_type`; the last is an older name of the first."""


def split_refusals(facts: MemoryFacts) -> tuple[str, ...]:
    """Return why smaller micro-batches would change the update, each as a clause; empty if they would not."""
    reasons = []
    if facts.trainer == "other":
        reasons.append(f"the loss of {facts.trainer_class} is not known")
    if facts.overridden:
        reasons.append(f"{facts.trainer_class} has its own {', '.join(facts.overridden)}")
    if facts.explicit_sizes:
        reasons.append(f"the batch is also set by {', '.join(facts.explicit_sizes)}")
    if facts.trainer == "grpo" and facts.loss_type not in EXACT_GRPO_LOSSES:
        unknown = f"loss_type={facts.loss_type!r} is not known"
        reasons.append(INEXACT_GRPO_LOSSES.get(facts.loss_type or "", unknown))
    if facts.entropy_bonus:
        reasons.append("the entropy bonus is a mean over the tokens of each micro-batch")
    if facts.top_entropy_quantile < 1.0:
        reasons.append(
            f"top_entropy_quantile={facts.top_entropy_quantile:g} takes its threshold from each micro-batch"
        )
    if facts.auxiliary_loss:
        reasons.append("the load of experts is balanced within each micro-batch")
    if facts.trainer in ("sft", "transformers"):
        if facts.trainer == "sft" and facts.loss_type not in EXACT_SFT_LOSSES:
            reasons.append(f"loss_type={facts.loss_type!r} is not known")
        if not facts.counts_tokens:
            reasons.append("the loss is a mean over the tokens of each micro-batch")
        elif facts.world_size > 1 and not facts.averages_tokens_across_ranks:
            reasons.append("average_tokens_across_devices=False divides by the tokens of each rank")
    return tuple(reasons)


def split_differences(facts: MemoryFacts) -> tuple[str, ...]:
    """Return what differs after a split although the update means the same, each as a clause; usually nothing."""
    differences = []
    if facts.dropout:
        differences.append("dropout draws other random numbers")
    if facts.has_ragged_batch:
        differences.append("the last batch of an epoch is filled up with other samples, or drops others")
    return tuple(differences)
