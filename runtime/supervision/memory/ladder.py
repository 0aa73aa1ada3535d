"""The ladder: which change of the memory plan comes next after a rank has run out of memory in a phase.

    phase → the rungs in order → the first that applies and is predicted to lower the peak of that phase

One change an attempt. The ladder ends because each rung can be climbed only so often. Pure; called by `policy.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from grpo_run.runtime.continuity.memory.split_exactness import split_differences
from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.memory.prediction import Device, Prediction, predict
from grpo_run.runtime.supervision.memory.rungs import Rung, Surroundings, climb
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase

_MICRO_BATCH = (
    Rung.micro_batch,
    Rung.gradient_checkpointing,
    Rung.vllm_sleep,
    Rung.vllm_share,
    Rung.expandable_segments,
)
ORDER: Mapping[MemoryPhase, tuple[Rung, ...]] = {
    MemoryPhase.generate: (
        Rung.generation_sub_batches,
        Rung.vllm_share,
        Rung.vllm_sleep,
        Rung.expandable_segments,
    ),
    MemoryPhase.score: _MICRO_BATCH,
    MemoryPhase.forward: _MICRO_BATCH,
    MemoryPhase.backward: _MICRO_BATCH,
    MemoryPhase.unknown: _MICRO_BATCH,
    MemoryPhase.optimizer: (
        Rung.optimizer_offload,
        Rung.vllm_sleep,
        Rung.vllm_share,
        Rung.expandable_segments,
    ),
    MemoryPhase.evaluate: (Rung.vllm_sleep, Rung.vllm_share, Rung.expandable_segments),
    MemoryPhase.save: (Rung.vllm_sleep, Rung.vllm_share, Rung.expandable_segments),
    MemoryPhase.load: (Rung.vllm_share, Rung.expandable_segments),
}
"""The rungs that keep the update, by the phase that died."""
DEGRADING = (Rung.shorter_completions,)
"""Rungs that change the experiment; climbed with `--allow-degrade` only, after all others."""


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A rung that was not climbed, and why, as a clause."""

    rung: Rung
    why: str

    @property
    def text(self) -> str:
        """The rung and the reason, for sentences."""
        return f"{str(self.rung).replace('_', ' ')}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """What the next attempt does otherwise.

    Attributes:
        rung: the one change.
        plan: with the change.
        prediction: the peak of the phase that died, before and after.
        skipped: earlier rungs, and why they were not climbed.
        inexact: why the update is not the same; empty if it is, up to the rounding of sums.
    """

    rung: Rung
    plan: MemoryPlan
    prediction: Prediction
    skipped: tuple[Skipped, ...]
    inexact: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Exhausted:
    """No rung is left: why each was not climbed, and what the user could change."""

    skipped: tuple[Skipped, ...]
    proposals: tuple[str, ...]


def next_change(
    phase: MemoryPhase,
    facts: MemoryFacts,
    plan: MemoryPlan,
    *,
    around: Surroundings,
    device: Device,
    fragmented: bool = False,
    cache_too_small: bool = False,
    allow_degrade: bool = False,
) -> PlanChange | Exhausted:
    """Return the next change of a plan, or why there is none.

    Args:
        phase: in which a rank ran out of memory.
        facts: of the `train()` call.
        plan: in effect.
        around: what the facts do not say.
        device: what the error says of the GPU.
        fragmented: the allocator had reserved enough, so expandable segments come first.
        cache_too_small: vLLM needs a larger share, not less memory in the phase.
        allow_degrade: the experiment may be changed.
    """
    rungs = ORDER[phase]
    if fragmented:
        rungs = (Rung.expandable_segments, *(rung for rung in rungs if rung is not Rung.expandable_segments))
    if cache_too_small:
        rungs = (Rung.larger_vllm_share,)
    skipped: list[Skipped] = []
    for rung in (*rungs, *(DEGRADING if allow_degrade else ())):
        climbed = climb(rung, facts, plan, around)
        if climbed is None:
            continue
        if isinstance(climbed, str):
            skipped.append(Skipped(rung=rung, why=climbed))
            continue
        prediction = predict(facts, phase, plan, climbed, device)
        if not prediction.lowers and not cache_too_small:
            skipped.append(Skipped(rung=rung, why="it would not lower the peak of this phase"))
            continue
        return PlanChange(
            rung=rung,
            plan=climbed,
            prediction=prediction,
            skipped=tuple(skipped),
            inexact=inexact(facts, plan, climbed),
        )
    return Exhausted(skipped=tuple(skipped), proposals=_proposals(phase, facts, plan, around))


def inexact(facts: MemoryFacts, before: MemoryPlan, after: MemoryPlan) -> tuple[str, ...]:
    """Return why the update is not the same after a change of plan; empty if it is, up to the rounding of sums."""
    reasons: list[str] = []
    if after.micro_batch_divisor != before.micro_batch_divisor:
        reasons += split_differences(facts)
    if after.generation_sub_batches != before.generation_sub_batches and not facts.greedy:
        reasons.append("completions that are sampled in smaller batches are other ones")
    if after.vllm_gpu_memory_utilization != before.vllm_gpu_memory_utilization and not facts.greedy:
        reasons.append("vLLM with another share of memory forms other batches and samples other completions")
    if after.max_completion_length != before.max_completion_length:
        reasons.append("completions are shorter than the script asks for")
    return tuple(reasons)


def _proposals(
    phase: MemoryPhase, facts: MemoryFacts, plan: MemoryPlan, around: Surroundings
) -> tuple[str, ...]:
    """Return what would help and changes the experiment, as phrases."""
    if phase is MemoryPhase.evaluate:
        return ("a smaller evaluation batch (per_device_eval_batch_size)",)
    proposals = []
    shorter = climb(Rung.shorter_completions, facts, plan, around)
    if isinstance(shorter, MemoryPlan):
        tokens = plan.max_completion_length or facts.max_completion_length
        proposals.append(
            f"shorter completions (max_completion_length={shorter.max_completion_length}, now {tokens})"
        )
    if facts.generates and (facts.num_generations or 0) > 2:
        proposals.append(f"fewer generations (num_generations, now {facts.num_generations})")
    if facts.trainer == "sft" and facts.max_length:
        proposals.append(f"shorter samples (max_length, now {facts.max_length})")
    return tuple(proposals)
