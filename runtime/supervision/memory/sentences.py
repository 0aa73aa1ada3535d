"""Sentences about a change of the memory plan, for the terminal. Pure; called by `run_memory.py`."""

from __future__ import annotations

from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.memory.ladder import PlanChange
from grpo_run.runtime.supervision.memory.prediction import vllm_share
from grpo_run.runtime.supervision.memory.rungs import Rung
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase
from grpo_run.watchdog.size_text import size_text

PHASE_NOUNS = {
    MemoryPhase.generate: "generation",
    MemoryPhase.score: "scoring",
    MemoryPhase.forward: "the forward pass",
    MemoryPhase.backward: "the backward pass",
    MemoryPhase.optimizer: "the optimizer's step",
    MemoryPhase.save: "saving",
    MemoryPhase.load: "loading",
    MemoryPhase.evaluate: "the evaluation",
    MemoryPhase.unknown: "training",
}


def sentences(
    change: PlanChange, phase: MemoryPhase, before: MemoryPlan, facts: MemoryFacts
) -> tuple[str, ...]:
    """Return what a change does, what it is predicted to save, why nothing before it was done, and what it costs in exactness."""
    prediction = change.prediction
    text = f"memory plan: {what_changes(change, before, facts)}"
    if change.rung is not Rung.larger_vllm_share:
        by = (
            "" if prediction.nominal else f" by {size_text(prediction.before_bytes - prediction.after_bytes)}"
        )
        text = f"{text}; predicted to lower the peak of {PHASE_NOUNS[phase]}{by}"
    said = [text]
    if change.skipped:
        said.append(f"memory plan: not changed are {'; '.join(skipped.text for skipped in change.skipped)}")
    if change.inexact:
        said.append(f"memory plan: the update is not exactly the same: {'; '.join(change.inexact)}")
    return tuple(said)


def what_changes(change: PlanChange, before: MemoryPlan, facts: MemoryFacts) -> str:
    """Return the change in the terms of the script's settings."""
    plan, rung = change.plan, change.rung
    match rung:
        case Rung.micro_batch:
            old, new = before.micro_batch_divisor, plan.micro_batch_divisor
            rows, steps = facts.per_device_train_batch_size, facts.gradient_accumulation_steps
            return (
                f"per_device_train_batch_size={rows // new} instead of {rows // old}, with"
                f" gradient_accumulation_steps={steps * new} instead of {steps * old}"
            )
        case Rung.generation_sub_batches:
            return f"each call of generation in {plan.generation_sub_batches} parts"
        case Rung.gradient_checkpointing:
            return "gradient checkpointing is turned on"
        case Rung.optimizer_offload:
            return "the optimizer's state is kept in host memory"
        case Rung.vllm_sleep:
            return "vLLM frees its memory during training"
        case Rung.vllm_share | Rung.larger_vllm_share:
            old_share, new_share = vllm_share(facts, before), vllm_share(facts, plan)
            return f"vllm_gpu_memory_utilization={new_share:g} instead of {old_share:g}"
        case Rung.expandable_segments:
            return "torch's allocator uses expandable segments"
        case Rung.shorter_completions:
            old_tokens = before.max_completion_length or facts.max_completion_length
            return f"max_completion_length={plan.max_completion_length} instead of {old_tokens} (--allow-degrade)"
