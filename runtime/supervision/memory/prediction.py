"""The peak of a rank's memory in each phase, in closed form: what a memory plan is predicted to change.

A closed form compares two plans of one run; it does not say whether either fits. The terms are those of a decoder:

- weights, gradients and the two moments of Adam, divided by the ranks where the layout shards them;
- activations of a token and layer: 34 values of `hidden_size` at two bytes each, of which gradient checkpointing keeps
  one per layer (2 bytes) and computes one layer again (Korthikanti et al., "Reducing Activation Recomputation in Large
  Transformer Models", equations 2 and 4, without the attention matrix, which flash attention does not store);
- the cache of keys and values, and one row of logits in 4 bytes per generated row;
- what vLLM reserves on the same GPU: its share, in generation always, in the other phases unless it sleeps;
- what the allocator has reserved and cannot use, if the error says how much; expandable segments leave none of it.

Log-probabilities are computed in chunks by TRL, so no logits of a whole micro-batch are held. Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from grpo_run.runtime.continuity.memory_facts import MemoryFacts, ModelFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase

ACTIVATION_VALUES = 17
"""Per token, layer and unit of `hidden_size`: 34 bytes at 2 bytes per value."""
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


@dataclass(frozen=True, kw_only=True)
class Device:
    """What the error says of the GPU, in bytes.

    Attributes:
        capacity_bytes: its memory.
        unallocated_bytes: reserved by torch's allocator, but not allocated; None if it is not known.
    """

    capacity_bytes: int = GPU_BYTES
    unallocated_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Peaks of one phase with two plans.

    Attributes:
        before_bytes, after_bytes: with the present plan and with the next one.
        nominal: the model's sizes are not known, so the figures are those of another model, and only their order counts.
    """

    before_bytes: int
    after_bytes: int
    nominal: bool

    @property
    def lowers(self) -> bool:
        """Whether the next plan needs less."""
        return self.after_bytes < self.before_bytes


def predict(
    facts: MemoryFacts, phase: MemoryPhase, before: MemoryPlan, after: MemoryPlan, device: Device
) -> Prediction:
    """Compare the peaks of a phase with two plans."""
    return Prediction(
        before_bytes=peak_bytes(facts, phase, before, device),
        after_bytes=peak_bytes(facts, phase, after, device),
        nominal=not knows_sizes(facts.model),
    )


def knows_sizes(model: ModelFacts) -> bool:
    """Whether the model says enough of itself for figures."""
    return min(model.parameter_bytes, model.layers, model.hidden_size) > 0


def peak_bytes(facts: MemoryFacts, phase: MemoryPhase, plan: MemoryPlan, device: Device) -> int:
    """Return the peak of one rank's memory in a phase, in bytes."""
    model = facts.model if knows_sizes(facts.model) else NOMINAL
    state = _State.of(facts, model, plan)
    held = _vllm_bytes(facts, phase, plan, device)
    if not plan.expandable_segments:
        # what is not known is a page of the allocator: more than none
        held += _PAGE_BYTES if device.unallocated_bytes is None else device.unallocated_bytes
    return held + _phase_bytes(facts, phase, plan, model, state)


def _phase_bytes(
    facts: MemoryFacts, phase: MemoryPhase, plan: MemoryPlan, model: ModelFacts, state: _State
) -> int:
    value_bytes = max(1, round(model.parameter_bytes / max(1, model.parameters)))
    rows = max(1, facts.per_device_train_batch_size // _divisor(facts, plan))
    layer = ACTIVATION_VALUES * value_bytes * model.hidden_size
    tokens = rows * _row_tokens(facts, plan)
    if phase is MemoryPhase.generate:
        return state.without_gradients + _generation_bytes(facts, model, plan, value_bytes)
    if phase is MemoryPhase.optimizer:
        # the update of a group of parameters is computed before it is applied
        return state.all + (0 if state.offloaded else model.trainable_bytes // state.optimizer_shards)
    if phase in (MemoryPhase.save, MemoryPhase.load):
        return state.all
    if phase is MemoryPhase.score:
        return state.without_gradients + tokens * layer
    kept = model.layers * layer
    if facts.gradient_checkpointing or plan.gradient_checkpointing:
        kept = model.layers * value_bytes * model.hidden_size + layer
    return state.all + tokens * kept


def _vllm_bytes(facts: MemoryFacts, phase: MemoryPhase, plan: MemoryPlan, device: Device) -> int:
    if facts.generates != "vllm_colocate":
        return 0
    sleeps = facts.vllm_sleep or plan.vllm_sleep
    if sleeps and phase is not MemoryPhase.generate:
        return 0
    return round(vllm_share(facts, plan) * device.capacity_bytes)


def vllm_share(facts: MemoryFacts, plan: MemoryPlan) -> float:
    """Return vLLM's share of a GPU with a plan."""
    return plan.vllm_gpu_memory_utilization or facts.vllm_gpu_memory_utilization or VLLM_SHARE


@dataclass(frozen=True, kw_only=True)
class _State:
    """What one rank keeps between phases, in bytes."""

    weights: int
    gradients: int
    optimizer: int
    optimizer_shards: int
    offloaded: bool

    @property
    def all(self) -> int:
        return self.weights + self.gradients + self.optimizer

    @property
    def without_gradients(self) -> int:
        return self.weights + self.optimizer

    @classmethod
    def of(cls, facts: MemoryFacts, model: ModelFacts, plan: MemoryPlan) -> _State:
        layout, ranks = facts.layout, facts.world_size
        fully = layout.startswith("fsdp") or layout == "deepspeed-zero3"
        optimizer_shards = ranks if fully or layout.startswith("deepspeed-zero") else 1
        gradient_shards = ranks if fully or layout == "deepspeed-zero2" else 1
        copies = 2 if facts.reference_model else 1
        offloaded = facts.optimizer_offload or plan.optimizer_offload
        return cls(
            weights=copies * model.parameter_bytes // (ranks if fully else 1),
            gradients=model.trainable_bytes // gradient_shards,
            optimizer=0 if offloaded else 2 * model.trainable_bytes // optimizer_shards,
            optimizer_shards=optimizer_shards,
            offloaded=offloaded,
        )


def rollout_rows(facts: MemoryFacts) -> int:
    """Return how many rows one rank generates in a call."""
    samples = facts.generation_batch_size
    if samples is None:
        steps = facts.steps_per_generation or facts.gradient_accumulation_steps
        return facts.per_device_train_batch_size * steps
    return max(1, samples // facts.world_size)


def _generation_bytes(facts: MemoryFacts, model: ModelFacts, plan: MemoryPlan, value_bytes: int) -> int:
    if facts.generates.startswith("vllm"):
        return 0  # in vLLM's own share
    rows = math.ceil(rollout_rows(facts) / plan.generation_sub_batches)
    key_value_size = model.key_value_heads * model.head_size or model.hidden_size
    cache = 2 * model.layers * key_value_size * value_bytes * _row_tokens(facts, plan)
    return rows * (cache + 4 * model.vocabulary_size)


def _row_tokens(facts: MemoryFacts, plan: MemoryPlan) -> int:
    if not facts.generates:
        return facts.max_length or COMPLETION_TOKENS
    limit = plan.max_completion_length or facts.max_completion_length
    return PROMPT_TOKENS + (limit or COMPLETION_TOKENS)


def _divisor(facts: MemoryFacts, plan: MemoryPlan) -> int:
    """Return by what a plan divides the micro-batch: as much of its divisor as divides the size."""
    return math.gcd(facts.per_device_train_batch_size, plan.micro_batch_divisor)
