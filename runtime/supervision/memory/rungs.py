"""The rungs of the ladder: single changes of the memory plan, each with the reason why it does not apply to a run.

    rung, facts, plan → the next plan, or why not

Pure. The order of the rungs, and whether one is predicted to help, is `ladder.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from grpo_run.runtime.continuity.memory.split_exactness import split_refusals
from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.memory.prediction import rollout_rows, vllm_share

LEAST_VLLM_SHARE = 0.1
"""Of a GPU. A smaller share holds the weights of no model that is worth vLLM."""
MOST_VLLM_SHARE = 0.9
"""vLLM's own default, for a GPU that it has to itself."""
LEAST_COMPLETION_TOKENS = 16


class Rung(str, Enum):
    """One change of a memory plan. The values appear in the journal."""

    micro_batch = "micro_batch"
    generation_sub_batches = "generation_sub_batches"
    gradient_checkpointing = "gradient_checkpointing"
    optimizer_offload = "optimizer_offload"
    vllm_sleep = "vllm_sleep"
    vllm_share = "vllm_share"
    larger_vllm_share = "larger_vllm_share"
    expandable_segments = "expandable_segments"
    shorter_completions = "shorter_completions"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What the facts of a call do not say.

    Attributes:
        segments_refused: why expandable segments cannot be used with the installed vLLM, as a clause; empty if they can.
        own_allocator_setting: the environment of the run sets `expandable_segments` itself.
    """

    segments_refused: str = ""
    own_allocator_setting: bool = False


Next = MemoryPlan | str | None
"""The next plan, or why the rung does not apply, as a clause; None if it does not concern the run at all."""


def climb(rung: Rung, facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    """Return the plan with one more change, or why it does not apply; None if it does not concern the run."""
    return _CHANGES[rung](facts, plan, around)


def _with(plan: MemoryPlan, **changes: object) -> MemoryPlan:
    return plan.model_copy(update=changes)


def _micro_batch(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if refusals := split_refusals(facts):
        return "; ".join(refusals)
    rows = facts.per_device_train_batch_size
    left, rest = divmod(rows, plan.micro_batch_divisor)
    now = "" if plan.micro_batch_divisor == 1 else f" (divided by {plan.micro_batch_divisor})"
    if left <= 1:
        return f"a micro-batch is one sample already: per_device_train_batch_size={rows}{now}"
    if rest or left % 2:
        return f"per_device_train_batch_size={rows}{now} is odd"
    return _with(plan, micro_batch_divisor=2 * plan.micro_batch_divisor)


def _generation_sub_batches(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if facts.generates.startswith("vllm"):
        return "vLLM forms its batches itself"
    if facts.generates == "continuous_batching":
        return "continuous batching forms its batches itself"
    if facts.generates == "script":
        return "a function of the script generates"
    if not facts.generates:
        return None
    rows = rollout_rows(facts)
    parts = 2 * plan.generation_sub_batches
    if parts > rows:
        return f"a part is one row already: {rows} rows in {plan.generation_sub_batches} parts"
    return _with(plan, generation_sub_batches=parts)


def _gradient_checkpointing(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if facts.gradient_checkpointing or plan.gradient_checkpointing:
        return "gradient checkpointing is on already"
    if facts.checkpointing_set_later:
        return "gradient checkpointing is also set by an assignment after the configuration was built"
    if not facts.supports_gradient_checkpointing:
        return "the model does not support gradient checkpointing"
    return _with(plan, gradient_checkpointing=True)


def _optimizer_offload(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if facts.optimizer_offload or plan.optimizer_offload:
        return "the optimizer's state is in host memory already"
    if not facts.deepspeed or not facts.layout.startswith("deepspeed-zero"):
        return "the optimizer's state can be moved to host memory only with DeepSpeed's ZeRO"
    return _with(plan, optimizer_offload=True)


def _vllm_sleep(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if facts.generates != "vllm_colocate":
        return None
    if facts.vllm_sleep or plan.vllm_sleep:
        return "vLLM frees its memory during training already"
    return _with(plan, vllm_sleep=True)


def _vllm_share(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if facts.generates != "vllm_colocate":
        return None
    share = vllm_share(facts, plan)
    if share > vllm_share(facts, MemoryPlan()):
        return f"vLLM needs vllm_gpu_memory_utilization={share:g}"
    lower = round(max(LEAST_VLLM_SHARE, share * 2 / 3), 2)
    if not lower < share:
        return f"vllm_gpu_memory_utilization={share:g} is as low as it can be"
    return _with(plan, vllm_gpu_memory_utilization=lower)


def _larger_vllm_share(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if facts.generates != "vllm_colocate":
        return None
    share = vllm_share(facts, plan)
    if share < vllm_share(facts, MemoryPlan()):
        return f"training left vLLM no more than vllm_gpu_memory_utilization={share:g}"
    larger = round(min(MOST_VLLM_SHARE, share * 3 / 2), 2)
    if not larger > share:
        return f"vllm_gpu_memory_utilization={share:g} is as high as it can be"
    return _with(plan, vllm_gpu_memory_utilization=larger)


def _expandable_segments(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if plan.expandable_segments:
        return "expandable segments are on already"
    if around.own_allocator_setting:
        return "the environment sets expandable_segments itself"
    sleeps = facts.generates == "vllm_colocate" and (facts.vllm_sleep or plan.vllm_sleep)
    if sleeps and around.segments_refused:
        return around.segments_refused
    return _with(plan, expandable_segments=True)


def _shorter_completions(facts: MemoryFacts, plan: MemoryPlan, around: Surroundings) -> Next:
    if not facts.generates:
        return None
    tokens = plan.max_completion_length or facts.max_completion_length
    if tokens is None:
        return "max_completion_length is not set"
    if tokens // 2 < LEAST_COMPLETION_TOKENS:
        return f"max_completion_length={tokens} is as short as it can be"
    return _with(plan, max_completion_length=tokens // 2)


_CHANGES: dict[Rung, Callable[[MemoryFacts, MemoryPlan, Surroundings], Next]] = {
    Rung.micro_batch: _micro_batch,
    Rung.generation_sub_batches: _generation_sub_batches,
    Rung.gradient_checkpointing: _gradient_checkpointing,
    Rung.optimizer_offload: _optimizer_offload,
    Rung.vllm_sleep: _vllm_sleep,
    Rung.vllm_share: _vllm_share,
    Rung.larger_vllm_share: _larger_vllm_share,
    Rung.expandable_segments: _expandable_segments,
    Rung.shorter_completions: _shorter_completions,
}
