"""The peak of a rank's memory in a phase with two memory plans: from traces of the job, or else by a closed
formula.

A prediction compares two plans of one run; it does not say whether either fits. Both add what neither knows:
what vLLM reserves on the same GPU (its share, in generation always, in the other phases unless it sleeps),
and what the allocator has reserved and cannot use, if the error says how much; expandable segments leave none
of it. Pure; called by `fallback_steps.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_run.runtime.memory.closed_form import Sizes, peaks
from grpo_run.runtime.memory.facts import MemoryFacts, ModelFacts
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase

PROMPT_TOKENS = 256
"""Taken for the prompt, whose length no setting says."""
COMPLETION_TOKENS = 512
"""Taken where no limit is set."""
_PAGE_BYTES = 2 << 20
"""A small segment of torch's allocator."""
VLLM_SHARE = 0.3
"""TRL's default of `vllm_gpu_memory_utilization`."""
GPU_BYTES = 80 << 30
"""Taken where the error does not say the capacity."""
NOMINAL = ModelFacts(
    parameters=500_000_000,
    trainable_parameters=500_000_000,
    parameter_bytes=1_000_000_000,
    trainable_bytes=1_000_000_000,
    layers=24,
    hidden_size=896,
    intermediate_size=4864,
    vocabulary_size=151_936,
    attention_heads=14,
    key_value_heads=2,
    head_size=64,
)
"""Sizes of Qwen2.5-0.5B, to compare plans for a model that does not say its own."""
STATELESS = frozenset({"adafactor", "sgd"})
"""Optimizers of transformers that keep no tensor of the weights' size."""
FUSED = "adamw_torch_fused"
"""The optimizer that applies the update while it computes it."""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What traces of the job have found.

    Attributes:
        peaks: by plan and name of the phase, in bytes of torch's allocator.
        missing: why a plan has no trace, as a clause; empty if none was asked for.
    """

    peaks: Mapping[MemoryPlan, Mapping[str, float]] = field(default_factory=dict)
    missing: str = ""

    def of(self, plan: MemoryPlan, phase: MemoryPhase) -> float | None:
        """Return the traced peak of a phase with a plan, in bytes; None if there is none."""
        return self.peaks.get(plan, {}).get(str(phase))


@dataclass(frozen=True, kw_only=True)
class PeakPrediction:
    """Peaks of one phase with two plans.

    Attributes:
        before_bytes, after_bytes: with the present plan and with the next one.
        nominal: the model's sizes are not known, so the figures are those of another model, and only their
            order counts.
        traced: the figures come from traces of the job.
        missing: why they do not, as a clause; empty if no trace would show the difference.
    """

    before_bytes: int
    after_bytes: int
    nominal: bool = False
    traced: bool = False
    missing: str = ""

    @property
    def lowers(self) -> bool:
        """Whether the next plan needs less."""
        return self.after_bytes < self.before_bytes

    @property
    def equal(self) -> bool:
        """Whether the plans do not differ in this phase."""
        return self.after_bytes == self.before_bytes

    @property
    def source(self) -> str:
        """Where the figures come from, in words."""
        if self.traced:
            return "traced"
        return f"closed form, not traced: {self.missing}" if self.missing else "closed form"


def predict(
    facts: MemoryFacts,
    phase: MemoryPhase,
    before: MemoryPlan,
    after: MemoryPlan,
    figures: Figures,
    traces: Traces | None = None,
) -> PeakPrediction:
    """Compare the peaks of a phase with two plans.

    Args:
        figures: what the error says of the GPU.
        traces: used if they have both plans.
    """
    traces = traces or Traces()
    traced_before, traced_after = traces.of(before, phase), traces.of(after, phase)
    if traced_before is not None and traced_after is not None:
        return PeakPrediction(
            before_bytes=round(traced_before) + _held(facts, phase, before, figures),
            after_bytes=round(traced_after) + _held(facts, phase, after, figures),
            traced=True,
        )
    return PeakPrediction(
        before_bytes=peak_bytes(facts, phase, before, figures),
        after_bytes=peak_bytes(facts, phase, after, figures),
        nominal=not knows_sizes(facts.model),
        missing=traces.missing,
    )


def knows_sizes(model: ModelFacts) -> bool:
    """Whether the model says enough of itself for figures."""
    return min(model.parameter_bytes, model.layers, model.hidden_size) > 0


def peak_bytes(facts: MemoryFacts, phase: MemoryPhase, plan: MemoryPlan, figures: Figures) -> int:
    """Return the peak of one rank's memory in a phase in closed form, in bytes."""
    found = peaks(sizes_of(facts, plan))
    return round(found.get(str(phase), found["state"])) + _held(facts, phase, plan, figures)


def sizes_of(facts: MemoryFacts, plan: MemoryPlan) -> Sizes:
    """Return the sizes of a run with a plan, for the closed form."""
    model = facts.model if knows_sizes(facts.model) else NOMINAL
    layout, ranks = facts.layout, facts.world_size
    fully = layout.startswith("fsdp") or layout == "deepspeed-zero3"
    offloaded = facts.optimizer_offload or plan.optimizer_offload
    computation = facts.computation
    heads = model.attention_heads or 1
    return Sizes(
        parameters=model.parameters,
        trained=model.trainable_parameters,
        value_bytes=model.parameter_bytes / max(1, model.parameters),
        autocast=bool(computation.autocast),
        reference=facts.reference_model,
        optimizer_states=0 if offloaded or computation.optimizer in STATELESS else 2,
        whole_update=not offloaded and computation.optimizer != FUSED,
        weight_shards=ranks if fully else 1,
        gradient_shards=ranks if fully or layout == "deepspeed-zero2" else 1,
        optimizer_shards=ranks if fully or layout.startswith("deepspeed-zero") else 1,
        layers=model.layers,
        hidden=model.hidden_size,
        heads=heads,
        key_value_heads=model.key_value_heads or heads,
        head_size=model.head_size or model.hidden_size // heads,
        intermediate=model.intermediate_size or 4 * model.hidden_size,
        vocabulary=model.vocabulary_size,
        rows=micro_batch_rows(facts, plan),
        row_tokens=_prompt_tokens(facts) + completion_tokens(facts, plan),
        scored_tokens=completion_tokens(facts, plan),
        checkpointing=facts.gradient_checkpointing or plan.gradient_checkpointing,
        accumulates=facts.gradient_accumulation_steps * divisor(facts, plan) > 1,
        generated_rows=_generated_rows(facts, plan),
        on_gpu=computation.device != "cpu",
    )


def _held(facts: MemoryFacts, phase: MemoryPhase, plan: MemoryPlan, figures: Figures) -> int:
    """What is in use on the device beside the job's tensors, as far as a plan changes it."""
    held = 0
    sleeps = (facts.vllm_sleep or plan.vllm_sleep) and phase is not MemoryPhase.generate
    if facts.generates == "vllm_colocate" and not sleeps:
        held = round(vllm_share(facts, plan) * (figures.capacity_bytes or GPU_BYTES))
    if plan.expandable_segments:
        return held
    # what is not known is a page of the allocator: more than none
    return held + (_PAGE_BYTES if figures.unallocated_bytes is None else figures.unallocated_bytes)


def vllm_share(facts: MemoryFacts, plan: MemoryPlan) -> float:
    """Return vLLM's share of a GPU with a plan."""
    return plan.vllm_gpu_memory_utilization or facts.vllm_gpu_memory_utilization or VLLM_SHARE


def rollout_rows(facts: MemoryFacts) -> int:
    """Return how many rows one rank generates in a call."""
    samples = facts.generation_batch_size
    if samples is None:
        steps = facts.steps_per_generation or facts.gradient_accumulation_steps
        return facts.per_device_train_batch_size * steps
    return max(1, samples // facts.world_size)


def divisor(facts: MemoryFacts, plan: MemoryPlan) -> int:
    """Return by what a plan divides the micro-batch: as much of its divisor as divides the size."""
    return math.gcd(facts.per_device_train_batch_size, plan.micro_batch_divisor)


def micro_batch_rows(facts: MemoryFacts, plan: MemoryPlan) -> int:
    """Return the rows of a micro-batch with a plan."""
    return facts.per_device_train_batch_size // divisor(facts, plan)


def completion_tokens(facts: MemoryFacts, plan: MemoryPlan) -> int:
    """Return the length of a completion with a plan, or of a sample of SFT."""
    if not facts.generates:
        return facts.max_length or COMPLETION_TOKENS
    return plan.max_completion_length or facts.max_completion_length or COMPLETION_TOKENS


def _prompt_tokens(facts: MemoryFacts) -> int:
    return PROMPT_TOKENS if facts.generates else 0


def _generated_rows(facts: MemoryFacts, plan: MemoryPlan) -> int:
    if not facts.generates or facts.generates.startswith("vllm"):
        return 0  # in vLLM's own share
    return math.ceil(rollout_rows(facts) / plan.generation_sub_batches)
