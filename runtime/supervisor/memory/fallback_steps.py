"""The fallback steps: which change of the memory plan comes next after a rank has run out of memory.

    phase → the fallback steps in order → the first that applies

Each fallback step is a single change of the plan: it returns the next plan, or the reason why it does not
apply to the run. One change an attempt; the sequence ends because each step can be taken only so often. The
order is fixed: nothing is predicted, and a change that was not enough is followed by the next one. Called by
`policy.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from grpo_run.runtime.memory.facts import MemoryFacts, split_differences, split_refusals
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import OUTSIDE, MemoryPhase, Shortage

VLLM_SHARE = 0.3
"""TRL's default of `vllm_gpu_memory_utilization`."""
LEAST_VLLM_SHARE = 0.1
"""Of a GPU. A smaller share holds the weights of no model that is worth vLLM."""
MOST_VLLM_SHARE = 0.9
"""vLLM's own default, for a GPU that it has to itself."""
LEAST_COMPLETION_TOKENS = 16


class FallbackStep(str, Enum):
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
class Situation:
    """An out-of-memory error and what is known of the run.

    Attributes:
        shortage: of the verdict.
        facts: of the `train()` call.
        start: where a restart continues, as a clause.
        budget: failures without progress that are recovered; 0 if the user wants no restart.
        grown_bytes: how much more the rank had allocated than early in the attempt.
        proceeds: the attempt has committed so many steps that it did the same work before.
        allow_degrade: the experiment may be changed.
        own_allocator_setting: the environment of the run sets `expandable_segments` itself.
    """

    shortage: Shortage
    facts: MemoryFacts
    start: str
    budget: int
    grown_bytes: int = 0
    proceeds: bool = False
    allow_degrade: bool = False
    own_allocator_setting: bool = False

    @property
    def fragmented(self) -> bool:
        """Whether the allocator had reserved what was asked for, in pieces that were too small."""
        figures = self.shortage.figures
        if figures.tried_bytes is None or figures.unallocated_bytes is None:
            return False
        return figures.unallocated_bytes >= figures.tried_bytes

    @property
    def crept(self) -> bool:
        """Whether memory has grown by at least what was missing, so that a restart would free enough."""
        tried, free = self.shortage.figures.tried_bytes, self.shortage.figures.free_bytes
        return tried is not None and self.grown_bytes > 0 and self.grown_bytes >= tried - (free or 0)

    @property
    def cache_too_small(self) -> bool:
        """Whether vLLM needs a larger share, not less memory in the phase."""
        return self.shortage.source is ErrorSource.vllm_cache

    @property
    def length_matters(self) -> bool:
        """Whether shorter rows need less memory where it ran out."""
        if self.shortage.phase is MemoryPhase.generate:
            return not self.facts.generates.startswith("vllm")
        return self.shortage.phase in ROW_PHASES

    @property
    def segments_refused(self) -> str:
        """Why expandable segments cannot help, as a clause; empty if they may."""
        if self.own_allocator_setting:
            return "the environment sets expandable_segments itself"
        figures = self.shortage.figures
        if figures.unallocated_bytes == 0:
            return "nothing is reserved and not allocated"
        if None in (figures.unallocated_bytes, figures.tried_bytes, figures.free_bytes):
            return ""
        missing_bytes = max(0, (figures.tried_bytes or 0) - (figures.free_bytes or 0))
        if (figures.unallocated_bytes or 0) < missing_bytes:
            return "less is reserved and not allocated than was missing"
        return ""

    def vllm_is_asleep(self, plan: MemoryPlan) -> bool:
        """Whether vLLM has given its memory back in the phase that died, so that a smaller share frees
        nothing there.
        """
        sleeps = self.facts.vllm_sleep or plan.vllm_sleep
        return sleeps and self.shortage.phase is not MemoryPhase.generate


Next = MemoryPlan | str | None
"""The next plan, or why the step does not apply, as a clause; None if it does not concern the run at all."""


def _with(plan: MemoryPlan, **changes: object) -> MemoryPlan:
    return plan.model_copy(update=changes)


def _micro_batch(facts: MemoryFacts, plan: MemoryPlan) -> Next:
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


def _generation_sub_batches(facts: MemoryFacts, plan: MemoryPlan) -> Next:
    if facts.generates.startswith("vllm"):
        return "vLLM forms its batches itself"
    if facts.generates == "continuous_batching":
        return "continuous batching forms its batches itself"
    if facts.generates == "script":
        return "a function of the script generates"
    if not facts.generates:
        return None
    rows = _rollout_rows(facts)
    parts = 2 * plan.generation_sub_batches
    if parts > rows:
        return f"a part is one row already: {rows} rows in {plan.generation_sub_batches} parts"
    return _with(plan, generation_sub_batches=parts)


def _rollout_rows(facts: MemoryFacts) -> int:
    """Return how many rows one rank generates in a call."""
    if facts.generation_batch_size is None:
        steps = facts.steps_per_generation or facts.gradient_accumulation_steps
        return facts.per_device_train_batch_size * steps
    return max(1, facts.generation_batch_size // facts.world_size)


def _gradient_checkpointing(facts: MemoryFacts, plan: MemoryPlan) -> Next:
    if facts.gradient_checkpointing or plan.gradient_checkpointing:
        return "gradient checkpointing is on already"
    if facts.checkpointing_set_later:
        return "gradient checkpointing is also set by an assignment after the configuration was built"
    if not facts.supports_gradient_checkpointing:
        return "the model does not support gradient checkpointing"
    return _with(plan, gradient_checkpointing=True)


def _optimizer_offload(facts: MemoryFacts, plan: MemoryPlan) -> Next:
    if facts.optimizer_offload or plan.optimizer_offload:
        return "the optimizer's state is in host memory already"
    if not facts.deepspeed or not facts.layout.startswith("deepspeed-zero"):
        return "the optimizer's state can be moved to host memory only with DeepSpeed's ZeRO"
    return _with(plan, optimizer_offload=True)


def _vllm_sleep(facts: MemoryFacts, plan: MemoryPlan) -> Next:
    if facts.generates != "vllm_colocate":
        return None
    if facts.vllm_sleep or plan.vllm_sleep:
        return "vLLM frees its memory during training already"
    return _with(plan, vllm_sleep=True)


def vllm_share(facts: MemoryFacts, plan: MemoryPlan) -> float:
    """Return vLLM's share of a GPU with a plan."""
    return plan.vllm_gpu_memory_utilization or facts.vllm_gpu_memory_utilization or VLLM_SHARE


def _vllm_share(facts: MemoryFacts, plan: MemoryPlan) -> Next:
    if facts.generates != "vllm_colocate":
        return None
    share = vllm_share(facts, plan)
    if share > vllm_share(facts, MemoryPlan()):
        return f"vLLM needs vllm_gpu_memory_utilization={share:g}"
    lower = round(max(LEAST_VLLM_SHARE, share * 2 / 3), 2)
    if not lower < share:
        return f"vllm_gpu_memory_utilization={share:g} is as low as it can be"
    return _with(plan, vllm_gpu_memory_utilization=lower)


def _larger_vllm_share(facts: MemoryFacts, plan: MemoryPlan) -> Next:
    if facts.generates != "vllm_colocate":
        return None
    share = vllm_share(facts, plan)
    if share < vllm_share(facts, MemoryPlan()):
        return f"training left vLLM no more than vllm_gpu_memory_utilization={share:g}"
    larger = round(min(MOST_VLLM_SHARE, share * 3 / 2), 2)
    if not larger > share:
        return f"vllm_gpu_memory_utilization={share:g} is as high as it can be"
    return _with(plan, vllm_gpu_memory_utilization=larger)


def _expandable_segments(facts: MemoryFacts, plan: MemoryPlan) -> Next:
    if plan.expandable_segments:
        return "expandable segments are on already"
    if facts.generates == "vllm_colocate" and (facts.vllm_sleep or plan.vllm_sleep):
        return "vLLM may refuse expandable segments while it sleeps"
    return _with(plan, expandable_segments=True)


def _shorter_completions(facts: MemoryFacts, plan: MemoryPlan) -> Next:
    if not facts.generates:
        return None
    tokens = plan.max_completion_length or facts.max_completion_length
    if tokens is None:
        return "max_completion_length is not set"
    if tokens // 2 < LEAST_COMPLETION_TOKENS:
        return f"max_completion_length={tokens} is as short as it can be"
    return _with(plan, max_completion_length=tokens // 2)


_CHANGES: dict[FallbackStep, Callable[[MemoryFacts, MemoryPlan], Next]] = {
    FallbackStep.micro_batch: _micro_batch,
    FallbackStep.generation_sub_batches: _generation_sub_batches,
    FallbackStep.gradient_checkpointing: _gradient_checkpointing,
    FallbackStep.optimizer_offload: _optimizer_offload,
    FallbackStep.vllm_sleep: _vllm_sleep,
    FallbackStep.vllm_share: _vllm_share,
    FallbackStep.larger_vllm_share: _larger_vllm_share,
    FallbackStep.expandable_segments: _expandable_segments,
    FallbackStep.shorter_completions: _shorter_completions,
}


_ELSEWHERE = (FallbackStep.vllm_sleep, FallbackStep.vllm_share, FallbackStep.expandable_segments)
"""What leaves more memory free, whatever needs it."""
_MICRO_BATCH = (FallbackStep.micro_batch, FallbackStep.gradient_checkpointing, *_ELSEWHERE)
ORDER: Mapping[MemoryPhase, tuple[FallbackStep, ...]] = {
    MemoryPhase.generate: (
        FallbackStep.generation_sub_batches,
        FallbackStep.vllm_share,
        FallbackStep.expandable_segments,
    ),
    MemoryPhase.score: (FallbackStep.micro_batch, *_ELSEWHERE),
    MemoryPhase.forward: _MICRO_BATCH,
    MemoryPhase.backward: _MICRO_BATCH,
    MemoryPhase.optimizer: (FallbackStep.optimizer_offload, *_ELSEWHERE),
    MemoryPhase.evaluate: _ELSEWHERE,
    MemoryPhase.save: _ELSEWHERE,
    MemoryPhase.load: (FallbackStep.vllm_share, FallbackStep.expandable_segments),
    **dict.fromkeys(OUTSIDE, _ELSEWHERE),
}
"""The steps that keep the update, by the phase that died."""
DEGRADING = (FallbackStep.shorter_completions,)
"""Steps that change the experiment; taken with `--allow-degrade` only, after all others, where they help."""

ROW_PHASES = frozenset({MemoryPhase.score, MemoryPhase.forward, MemoryPhase.backward})
"""Phases that need less memory if rows are shorter, whatever generates them."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A step that was not taken, and why, as a clause."""

    fallback_step: FallbackStep
    why: str

    @property
    def text(self) -> str:
        """The step and the reason, for sentences."""
        return f"{str(self.fallback_step).replace('_', ' ')}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """What the next attempt does otherwise.

    Attributes:
        phase: that died.
        fallback_step: the one change.
        plan: with the change.
        skipped: earlier steps, and why they were not taken.
        inexact: why the update is not the same; empty if it is, up to the rounding of sums.
        why: why the plan changes, if not for want of memory.
    """

    phase: MemoryPhase
    fallback_step: FallbackStep
    plan: MemoryPlan
    skipped: tuple[Skipped, ...]
    inexact: tuple[str, ...]
    why: str = ""


def smaller_generation(facts: MemoryFacts, plan: MemoryPlan, why: str) -> PlanChange | None:
    """Return the change that generates in smaller calls, one after another; None if they cannot be smaller.

    Args:
        why: the reason, as a clause.
    """
    after = _generation_sub_batches(facts, plan)
    if not isinstance(after, MemoryPlan):
        return None
    return PlanChange(
        phase=MemoryPhase.generate,
        fallback_step=FallbackStep.generation_sub_batches,
        plan=after,
        skipped=(),
        inexact=inexact(facts, plan, after),
        why=why,
    )


@dataclass(frozen=True, kw_only=True)
class Exhausted:
    """No step is left, or none is to be taken: why, why each was not changed, and what the user could
    change.
    """

    skipped: tuple[Skipped, ...]
    proposals: tuple[str, ...]
    why: str = "no change of the memory plan is left that keeps the update"


def next_change(situation: Situation, plan: MemoryPlan) -> PlanChange | Exhausted:
    """Return the next change of a plan, or why there is none.

    Args:
        situation: the error; fragmented memory takes expandable segments first.
        plan: in effect.
    """
    phase, facts = situation.shortage.phase, situation.facts
    steps = ORDER[phase]
    if situation.fragmented:
        steps = (FallbackStep.expandable_segments, *steps)
    if situation.cache_too_small:
        steps = (FallbackStep.larger_vllm_share,)
    if situation.allow_degrade and situation.length_matters:
        steps = (*steps, *DEGRADING)
    skipped: list[Skipped] = []
    for step in dict.fromkeys(steps):
        changed = _changed(step, situation, plan)
        if isinstance(changed, MemoryPlan):
            return PlanChange(
                phase=phase,
                fallback_step=step,
                plan=changed,
                skipped=tuple(skipped),
                inexact=inexact(facts, plan, changed),
            )
        if changed is not None:
            skipped.append(Skipped(fallback_step=step, why=changed))
    return Exhausted(skipped=tuple(skipped), proposals=proposals(situation, plan))


def _changed(step: FallbackStep, situation: Situation, plan: MemoryPlan) -> Next:
    """Return what a step makes of a plan, unless what the error says of the memory excludes that it helps."""
    changed = _CHANGES[step](situation.facts, plan)
    if step is FallbackStep.expandable_segments:
        return situation.segments_refused or changed
    if step is FallbackStep.vllm_share and isinstance(changed, MemoryPlan) and situation.vllm_is_asleep(plan):
        return "vLLM has given its memory back in this phase already"
    return changed


def inexact(facts: MemoryFacts, before: MemoryPlan, after: MemoryPlan) -> tuple[str, ...]:
    """Return why the update is not the same after a change of plan; empty if it is, up to the rounding of
    sums.
    """
    reasons: list[str] = []
    if after.micro_batch_divisor != before.micro_batch_divisor:
        reasons += split_differences(facts)
    if after.generation_sub_batches != before.generation_sub_batches and not facts.greedy:
        reasons.append("sampling in smaller batches gives different completions")
    if after.vllm_gpu_memory_utilization != before.vllm_gpu_memory_utilization and not facts.greedy:
        reasons.append(
            "vLLM with another share of memory forms different batches and samples different completions"
        )
    if after.max_completion_length != before.max_completion_length:
        reasons.append("completions are shorter than the script asks for")
    return tuple(reasons)


def proposals(situation: Situation, plan: MemoryPlan) -> tuple[str, ...]:
    """Return what would lower the peak of the phase and changes the experiment, as phrases with the present
    values.
    """
    facts = situation.facts
    if not situation.length_matters:
        return ()
    if facts.trainer == "sft":
        return (f"shorter samples (max_length, now {facts.max_length})",) if facts.max_length else ()
    shorter = _shorter_completions(facts, plan)
    if not isinstance(shorter, MemoryPlan):
        return ()
    tokens = plan.max_completion_length or facts.max_completion_length
    values = f"max_completion_length={shorter.max_completion_length}, now {tokens}"
    return (f"shorter completions ({values}; `--allow-degrade` halves it)",)
