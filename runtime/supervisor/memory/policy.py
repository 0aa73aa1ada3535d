"""The decision after a rank has run out of GPU memory: change the plan, restart once, or give up.

A change of plan spends no restart budget, because the number of fallback steps bounds it. An unchanged
restart frees what was cached. It is tried once for a plan and a phase, if that may suffice: the allocator
had reserved enough (fragmentation), the attempt had done the same work before and memory has grown since
(creep, measured from the ranks' figures on the board), or no phase of a trainer was open, so that no plan
makes the request smaller. It spends the budget like any other restart. Where the script itself asks for the
same again after a change, no further change is made. Also builds the sentences for the terminal. Called by
`runtime/supervisor/run_memory.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.supervisor.memory._prediction import (
    GPU_BYTES,
    DeviceFigures,
    PeakPrediction,
    divisor,
    micro_batch_rows,
    vllm_share,
)
from grpo_run.runtime.supervisor.memory.fallback_steps import (
    Exhausted,
    FallbackStep,
    OutOfMemoryContext,
    PlanChange,
    Tracer,
    next_change,
    no_traces,
    proposals,
)
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.memory.shortage import OUTSIDE, MemoryPhase, Shortage
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.text import size_text

EARLY_COMMITS = 3
"""Commits of an attempt after which every step has allocated what it keeps: Adam's state exists from the
first step on.
"""


class MemoryGrowth:
    """Growth of the ranks of one attempt."""

    def __init__(self) -> None:
        self._commits = 0
        self._early: dict[int, int] = {}

    def committed(self, read: Callable[[], Mapping[int, RankMemory]]) -> None:
        """A step has been committed.

        Args:
            read: returns the memory of the ranks now; called once in an attempt.
        """
        self._commits += 1
        if self._commits == EARLY_COMMITS:
            self._early = {rank: _kept_bytes(memory) for rank, memory in read().items()}

    def grown_bytes(self, rank: int, memory: RankMemory | None) -> int:
        """Return how much more a rank keeps between its steps than early in the attempt; 0 if it is not
        known.
        """
        if memory is None or not self._early.get(rank):
            return 0
        return max(0, _kept_bytes(memory) - self._early[rank])


def _kept_bytes(memory: RankMemory) -> int:
    """What tensors on the device use after an optimizer step."""
    optimizer = memory.phases.get(Phase.optimizer)
    return optimizer.allocated_bytes if optimizer is not None else 0


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
    """Return what a change does, what it is predicted to save, why nothing before it was done, and what it
    costs in exactness.
    """
    text = f"memory plan: {what_changes(change, before, facts)}"
    if change.fallback_step is not FallbackStep.larger_vllm_share:
        text = f"{text}; {_predicted(change.prediction, phase)}"
    said = [text]
    if change.skipped:
        said.append(f"memory plan: not changed: {'; '.join(skipped.text for skipped in change.skipped)}")
    if change.inexact:
        said.append(f"memory plan: the update is not exactly the same: {'; '.join(change.inexact)}")
    return tuple(said)


def _predicted(prediction: PeakPrediction, phase: MemoryPhase) -> str:
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
    plan, step = change.plan, change.fallback_step
    match step:
        case FallbackStep.micro_batch:
            return _micro_batch(before, plan, facts)
        case FallbackStep.generation_sub_batches:
            return f"each call of generation in {plan.generation_sub_batches} parts"
        case FallbackStep.gradient_checkpointing:
            return "gradient checkpointing is turned on"
        case FallbackStep.optimizer_offload:
            return "the optimizer's state is kept in host memory"
        case FallbackStep.vllm_sleep:
            return "vLLM frees its memory during training"
        case FallbackStep.vllm_share | FallbackStep.larger_vllm_share:
            shares = (vllm_share(facts, before), vllm_share(facts, plan))
            return _changed("vllm_gpu_memory_utilization", *shares)
        case FallbackStep.expandable_segments:
            return "torch's allocator uses expandable segments"
        case FallbackStep.shorter_completions:
            tokens = before.max_completion_length or facts.max_completion_length
            return (
                f"{_changed('max_completion_length', tokens, plan.max_completion_length)} (--allow-degrade)"
            )


@dataclass(frozen=True, kw_only=True)
class MemoryDecision:
    """What follows, and how it was found.

    Attributes:
        decision: for the agent and the journal.
        phase: that died.
        change: of the plan; None if it stays.
    """

    decision: Decision
    phase: MemoryPhase
    change: PlanChange | None = None


@dataclass(frozen=True, kw_only=True)
class Situation:
    """An out-of-memory error and what is known of the run.

    Attributes:
        shortage: of the verdict.
        facts: of the `train()` call.
        around: what the facts do not say.
        start: where a restart continues, as a clause.
        budget: failures without progress that are recovered; 0 if the user wants no restart.
        grown_bytes: how much more the rank had allocated than early in the attempt.
        proceeds: the attempt has committed so many steps that it did the same work before.
        allow_degrade: the experiment may be changed.
    """

    shortage: Shortage
    facts: MemoryFacts
    around: OutOfMemoryContext
    start: str
    budget: int
    grown_bytes: int = 0
    proceeds: bool = False
    allow_degrade: bool = False

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
    def device(self) -> DeviceFigures:
        """What the error says of the GPU."""
        figures = self.shortage.figures
        missing_bytes = None
        if figures.tried_bytes is not None and figures.free_bytes is not None:
            missing_bytes = max(0, figures.tried_bytes - figures.free_bytes)
        return DeviceFigures(
            capacity_bytes=figures.capacity_bytes or GPU_BYTES,
            unallocated_bytes=figures.unallocated_bytes,
            missing_bytes=missing_bytes,
        )


def decide_out_of_memory(history: History, situation: Situation, trace: Tracer = no_traces) -> MemoryDecision:
    """Return what follows an out-of-memory error of a GPU.

    Args:
        history: contains this incident as its last recovery.
        situation: the error.
        trace: traces plans if the choice depends on it.
    """
    if situation.budget == 0:
        return _stop(situation, "restarts are switched off (--max-restarts 0)")
    fragmented, phase = situation.fragmented, situation.shortage.phase
    futile = _changed_in_vain(history, situation.shortage)
    within_budget = history.failures_without_progress <= situation.budget
    once = within_budget and not futile and not _restarted_unchanged(history, phase)
    if once and phase in OUTSIDE:
        return _restart_once(situation, "no phase of a trainer has asked for the memory")
    if once and situation.crept and not fragmented:
        return _restart_once(situation, "memory had grown since the attempt began, and a restart frees it")
    found = _next(history, situation, trace, futile=futile)
    segments = isinstance(found, PlanChange) and found.fallback_step is FallbackStep.expandable_segments
    if once and fragmented and (situation.crept or not segments):
        return _restart_once(situation, "memory was fragmented, and a restart frees it")
    if isinstance(found, PlanChange):
        return MemoryDecision(
            decision=Decision(
                action=Action.restart_with_plan_change,
                reason=f"{situation.start}, with {plan_in_settings(found.plan, situation.facts)}",
            ),
            phase=situation.shortage.phase,
            change=found,
        )
    if situation.proceeds and history.failures_without_progress <= 1:
        # each attempt gets further: giving up would lose a run that proceeds
        return _restart(
            situation, "with the same memory plan, because the run makes progress and no change is left"
        )
    return _stop(situation, _exhausted_text(found))


def _changed_in_vain(history: History, shortage: Shortage) -> bool:
    """Whether the plan was changed for this request before."""
    return any(
        recovery.action == str(Action.restart_with_plan_change) and shortage.repeats(recovery.shortage)
        for recovery in history.recoveries[:-1]
    )


def _next(history: History, situation: Situation, trace: Tracer, *, futile: bool) -> PlanChange | Exhausted:
    shortage, facts, plan = situation.shortage, situation.facts, history.memory.plan
    if futile:
        return Exhausted(
            skipped=(),
            proposals=proposals(shortage.phase, facts, plan, situation.around),
            why=(
                f"{shortage.line.rpartition('/')[2]} asked for the same again after the memory plan was"
                " changed"
            ),
        )
    return next_change(
        shortage.phase,
        facts,
        plan,
        around=situation.around,
        device=situation.device,
        fragmented=situation.fragmented,
        cache_too_small=shortage.source is ErrorSource.vllm_cache,
        allow_degrade=situation.allow_degrade,
        trace=trace,
    )


def _restart_once(situation: Situation, cause: str) -> MemoryDecision:
    return _restart(situation, f"with the same memory plan once, because {cause}")


def _restart(situation: Situation, how: str) -> MemoryDecision:
    decision = Decision(action=Action.restart, reason=f"{situation.start}, {how}")
    return MemoryDecision(decision=decision, phase=situation.shortage.phase)


def _restarted_unchanged(history: History, phase: MemoryPhase) -> bool:
    """Whether the present plan has had its unchanged restart after memory was exhausted in a phase."""
    return any(
        recovery.cause == str(Cause.gpu_oom)
        and recovery.action == str(Action.restart)
        and recovery.memory_plan == history.memory.plan.text
        and recovery.shortage.get("phase") == str(phase)
        for recovery in history.recoveries[:-1]
    )


def _exhausted_text(found: Exhausted) -> str:
    text = found.why
    if found.skipped:
        text = f"{text} ({'; '.join(skipped.text for skipped in found.skipped)})"
    if found.proposals:
        text = f"{text}. What would change the experiment: {' or '.join(found.proposals)}"
    return text


def _stop(situation: Situation, reason: str) -> MemoryDecision:
    return MemoryDecision(
        decision=Decision(action=Action.stop, reason=reason), phase=situation.shortage.phase
    )
