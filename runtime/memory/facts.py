"""The facts of a `train()` call that decide how it could use less memory, and what a split changes.

The first rank of each node collects them when a call begins (`runtime/rank/memory_facts.py`); the
supervisor reads them after an out-of-memory error, when no rank is left to ask. Sizes are those that the
script has set, whatever plan is in effect. `files.py` reads and writes the file.

`split_refusals` says why smaller micro-batches would not give the same update. The sums of gradients are
equal up to rounding if each micro-batch of a step has the same weight, or if the loss is divided by a
number of the whole step. A split is refused where that does not hold;
a test trains each loss both ways. Plain data and pure functions. Reads TRL
1.16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import pydantic

from grpo_run.runtime.upstream.trainer_kinds import TrainerKind

Generator = Literal["", "transformers", "continuous_batching", "vllm_colocate", "vllm_server", "script"]
"""What generates; empty if nothing does, `script` for a rollout function of the script's own."""


class MemoryFacts(pydantic.BaseModel):
    """What a `train()` call tells of itself, as far as its memory and its update depend on it."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")

    trainer_class: str
    trainer: TrainerKind
    overridden: tuple[str, ...] = ()
    """What of the trainer's own computation of the loss the script replaces: names of methods, or
    `compute_loss_func`.
    """
    world_size: int = pydantic.Field(ge=1)
    layout: str
    """How state is spread over ranks: `ddp`, `deepspeed-zero3`, `fsdp2`, as in the manifest of a
    checkpoint.
    """

    per_device_train_batch_size: int = pydantic.Field(ge=1)
    gradient_accumulation_steps: int = pydantic.Field(ge=1)
    steps_per_generation: int | None = None
    generation_batch_size: int | None = None
    """Samples of one rollout over all ranks."""
    max_completion_length: int | None = None
    """In tokens."""
    max_length: int | None = None
    """Longest sample of SFT in tokens; None if there is no limit."""
    samples: int | None = None
    """In the training set; None for a stream."""
    drop_last: bool = False
    explicit_sizes: tuple[str, ...] = ()
    """Sizes of the batch that the script also sets elsewhere, by the name of the setting: in DeepSpeed's
    configuration, or in accelerate's."""

    loss_type: str | None = None
    entropy_bonus: bool = False
    top_entropy_quantile: float = 1.0
    auxiliary_loss: bool = False
    """Whether a mixture of experts adds its loss over the load of experts."""
    dropout: bool = False
    counts_tokens: bool = False
    """Whether the loss is divided by the tokens of the whole optimizer step, not of one micro-batch."""
    averages_tokens_across_ranks: bool = True

    generates: Generator = ""
    greedy: bool = False
    """Whether generation draws no random numbers."""
    vllm_gpu_memory_utilization: float | None = None
    vllm_sleep: bool = False
    vllm_wakes_with_weights: bool = True
    """Whether TRL sends the weights anew to a vLLM that has slept."""
    gradient_checkpointing: bool = False
    """Whether the script has turned it on."""
    checkpointing_set_later: bool = False
    """Whether the script sets it after its configuration was built, so that a plan would not take effect."""
    supports_gradient_checkpointing: bool = False
    optimizer_offload: bool = False
    """Whether the script already keeps the optimizer's state in host memory."""
    deepspeed: bool = False

    def divisor(self, most: int) -> int:
        """Return by what a micro-batch is divided that is to be divided by `most`: as much of it as divides
        the size.
        """
        return math.gcd(self.per_device_train_batch_size, most)

    @property
    def has_ragged_batch(self) -> bool:
        """Whether the last batch of an epoch may be filled up, or dropped, otherwise if the micro-batch is
        smaller.

        Rollouts are always whole. With one rank and nothing dropped, the last step has the samples that are
        left in any case.
        """
        if self.generates or (self.world_size == 1 and not self.drop_last and self.samples is not None):
            return False
        return (
            self.samples is None or self.samples % (self.per_device_train_batch_size * self.world_size) != 0
        )


EXACT_GRPO_LOSSES = frozenset({"grpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"})
"""Values of GRPO's `loss_type`: means over samples, and sums divided by the tokens of the whole rollout."""
INEXACT_GRPO_LOSSES: Mapping[str, str] = {
    "bnpo": "loss_type='bnpo' divides by the tokens of each micro-batch"
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
    """Return what differs after a split although the update means the same, each as a clause; usually
    nothing.
    """
    differences = []
    if facts.dropout:
        differences.append("dropout draws other random numbers")
    if facts.has_ragged_batch:
        differences.append("the last batch of an epoch is filled up with other samples, or drops others")
    return tuple(differences)
