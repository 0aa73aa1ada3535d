"""Sentences about a change of the memory plan, for the terminal. Pure; called by `run_memory.py`."""

from __future__ import annotations

from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.memory.ladder import PlanChange
from grpo_run.runtime.supervision.memory.prediction import Prediction, divisor, micro_batch_rows, vllm_share
from grpo_run.runtime.supervision.memory.rungs import Rung
from grpo_run.watchdog.out_of_memory.phases import OUTSIDE, MemoryPhase
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
}


def sentences(
    change: PlanChange, phase: MemoryPhase, before: MemoryPlan, facts: MemoryFacts
) -> tuple[str, ...]:
    """Return what a change does, what it is predicted to save, why nothing before it was done, and what it costs in exactness."""
    text = f"memory plan: {what_changes(change, before, facts)}"
    if change.rung is not Rung.larger_vllm_share:
        text = f"{text}; {_predicted(change.prediction, phase)}"
    said = [text]
    if change.skipped:
        said.append(f"memory plan: not changed: {'; '.join(skipped.text for skipped in change.skipped)}")
    if change.inexact:
        said.append(f"memory plan: the update is not exactly the same: {'; '.join(change.inexact)}")
    return tuple(said)


def _predicted(prediction: Prediction, phase: MemoryPhase) -> str:
    saved = prediction.before_bytes - prediction.after_bytes
    if phase in OUTSIDE:
        return f"predicted to leave {size_text(saved)} more free"
    noun = PHASE_NOUNS[phase]
    if prediction.nominal:
        return f"predicted to lower the peak of {noun}"
    before, after = size_text(prediction.before_bytes), size_text(prediction.after_bytes)
    if before == after and saved > 0:
        return f"predicted {before} in {noun}, {size_text(saved)} less than before ({prediction.source})"
    return f"predicted {before} -> {after} in {noun} ({prediction.source})"


def plan_in_settings(plan: MemoryPlan, facts: MemoryFacts) -> str:
    """Return everything that a plan changes in the terms of the script's settings."""
    said = []
    if plan.micro_batch_divisor > 1:
        said.append(_micro_batch(MemoryPlan(), plan, facts))
    if plan.generation_sub_batches > 1:
        said.append(f"generation in {plan.generation_sub_batches} parts")
    if plan.gradient_checkpointing:
        said.append("gradient checkpointing")
    if plan.optimizer_offload:
        said.append("the optimizer's state in host memory")
    if plan.vllm_gpu_memory_utilization is not None:
        said.append(
            _changed("vllm_gpu_memory_utilization", *(vllm_share(facts, one) for one in (MemoryPlan(), plan)))
        )
    if plan.vllm_sleep:
        said.append("vllm_enable_sleep_mode=True")
    if plan.expandable_segments:
        said.append("expandable segments")
    if plan.max_completion_length is not None:
        said.append(
            _changed("max_completion_length", facts.max_completion_length, plan.max_completion_length)
        )
    return ", ".join(said)


def _micro_batch(before: MemoryPlan, after: MemoryPlan, facts: MemoryFacts) -> str:
    rows = [micro_batch_rows(facts, plan) for plan in (before, after)]
    steps = [facts.gradient_accumulation_steps * divisor(facts, plan) for plan in (before, after)]
    return (
        f"{_changed('per_device_train_batch_size', *rows)}, {_changed('gradient_accumulation_steps', *steps)}"
    )


def _changed(name: str, before: float | None, after: float | None) -> str:
    old, new = ("none" if value is None else f"{value:g}" for value in (before, after))
    return f"{name} {old} -> {new}"


def what_changes(change: PlanChange, before: MemoryPlan, facts: MemoryFacts) -> str:
    """Return the change in the terms of the script's settings."""
    plan, rung = change.plan, change.rung
    match rung:
        case Rung.micro_batch:
            return _micro_batch(before, plan, facts)
        case Rung.generation_sub_batches:
            return f"each call of generation in {plan.generation_sub_batches} parts"
        case Rung.gradient_checkpointing:
            return "gradient checkpointing is turned on"
        case Rung.optimizer_offload:
            return "the optimizer's state is kept in host memory"
        case Rung.vllm_sleep:
            return "vLLM frees its memory during training"
        case Rung.vllm_share | Rung.larger_vllm_share:
            shares = (vllm_share(facts, before), vllm_share(facts, plan))
            return _changed("vllm_gpu_memory_utilization", *shares)
        case Rung.expandable_segments:
            return "torch's allocator uses expandable segments"
        case Rung.shorter_completions:
            tokens = before.max_completion_length or facts.max_completion_length
            return (
                f"{_changed('max_completion_length', tokens, plan.max_completion_length)} (--allow-degrade)"
            )
