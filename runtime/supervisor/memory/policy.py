"""The decision after a rank has run out of GPU memory: change the plan, restart once, or give up; and after
generation has not returned in time twice at one step: generate in smaller calls.

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
from grpo_run.runtime.supervisor.memory.fallback_steps import (
    Exhausted,
    FallbackStep,
    PlanChange,
    Situation,
    next_change,
    proposals,
    smaller_generation,
    vllm_share,
)
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.memory.shortage import OUTSIDE, MemoryPhase, Shortage
from grpo_run.watchdog.observation import Phase

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


def sentences(change: PlanChange, before: MemoryPlan, facts: MemoryFacts) -> tuple[str, ...]:
    """Return what a change does, why nothing before it was done, and what it costs in exactness."""
    text = f"memory plan: {in_settings(before, change.plan, facts)}"
    if change.why:
        text = f"{text}; {change.why}"
    said = [text]
    if change.skipped:
        said.append(f"memory plan: not changed: {'; '.join(skipped.text for skipped in change.skipped)}")
    if change.inexact:
        said.append(f"memory plan: the update is not exactly the same: {'; '.join(change.inexact)}")
    return tuple(said)


SWITCHES = {
    "gradient_checkpointing": "gradient checkpointing",
    "optimizer_offload": "the optimizer's state in host memory",
    "vllm_sleep": "vllm_enable_sleep_mode=True",
    "expandable_segments": "expandable segments",
}
"""What a plan turns on, in words."""


def in_settings(before: MemoryPlan, after: MemoryPlan, facts: MemoryFacts) -> str:
    """Return what differs between two plans in the terms of the script's settings."""
    plans = (before, after)
    said = []
    if before.micro_batch_divisor != after.micro_batch_divisor:
        rows = [facts.micro_batch(plan) for plan in plans]
        steps = [facts.gradient_accumulation_steps * facts.divisor(plan) for plan in plans]
        said.append(_changed("per_device_train_batch_size", *rows))
        said.append(_changed("gradient_accumulation_steps", *steps))
    if before.generation_sub_batches != after.generation_sub_batches:
        said.append(f"generation in {after.generation_sub_batches} parts")
    said += [text for name, text in SWITCHES.items() if getattr(after, name) and not getattr(before, name)]
    if before.vllm_gpu_memory_utilization != after.vllm_gpu_memory_utilization:
        shares = [vllm_share(facts, plan) for plan in plans]
        said.append(_changed("vllm_gpu_memory_utilization", *shares))
    if before.max_completion_length != after.max_completion_length:
        tokens = [plan.max_completion_length or facts.max_completion_length for plan in plans]
        said.append(f"{_changed('max_completion_length', *tokens)} (--allow-degrade)")
    return ", ".join(said)


def _changed(name: str, before: float | None, after: float | None) -> str:
    old, new = ("none" if value is None else f"{value:g}" for value in (before, after))
    return f"{name} {old} -> {new}"


@dataclass(frozen=True, kw_only=True)
class MemoryDecision:
    """What follows, and how it was found.

    Attributes:
        decision: for the agent and the journal.
        change: of the plan; None if it stays.
    """

    decision: Decision
    change: PlanChange | None = None


def decide_out_of_memory(history: History, situation: Situation) -> MemoryDecision:
    """Return what follows an out-of-memory error of a GPU.

    Args:
        history: contains this incident as its last recovery.
        situation: the error.
    """
    if situation.budget == 0:
        return _stop("restarts are switched off (--max-restarts 0)")
    fragmented, phase = situation.fragmented, situation.shortage.phase
    futile = _changed_in_vain(history, situation.shortage)
    within_budget = history.failures_without_progress <= situation.budget
    once = within_budget and not futile and not _restarted_unchanged(history, phase)
    if once and phase in OUTSIDE:
        return _restart_once(situation, "no phase of a trainer has asked for the memory")
    if once and situation.crept and not fragmented:
        return _restart_once(situation, "memory had grown since the attempt began, and a restart frees it")
    found = _next(history, situation, futile=futile)
    segments = isinstance(found, PlanChange) and found.fallback_step is FallbackStep.expandable_segments
    if once and fragmented and (situation.crept or not segments):
        return _restart_once(situation, "memory was fragmented, and a restart frees it")
    if isinstance(found, PlanChange):
        return MemoryDecision(
            decision=Decision(
                action=Action.restart_with_plan_change,
                reason=f"{situation.start}, with {in_settings(MemoryPlan(), found.plan, situation.facts)}",
            ),
            change=found,
        )
    if situation.proceeds and history.failures_without_progress <= 1:
        # each attempt gets further: giving up would lose a run that proceeds
        return _restart(
            situation, "with the same memory plan, because the run makes progress and no change is left"
        )
    return _stop(_exhausted_text(found))


def decide_generation_stall(
    history: History, facts: MemoryFacts, *, start: str, budget: int
) -> MemoryDecision | None:
    """Return the restart with smaller calls of generation, after it has not returned twice at one step; None
    in any other case: the first time, and if smaller calls did not help either.

    Args:
        history: contains this stall as its last recovery.
        start: where a restart continues, as a clause.
        budget: failures without progress that are recovered.
    """
    if len(history.recoveries) < 2 or history.failures_without_progress > budget:
        return None
    before, now = history.recoveries[-2:]
    same = (before.cause, before.train_call, before.step) == (now.cause, now.train_call, now.step)
    if not same or before.action != str(Action.restart):
        return None
    why = "generation has not returned in time twice at this step"
    change = smaller_generation(facts, history.memory.plan, why)
    if change is None:
        return None
    settings = in_settings(MemoryPlan(), change.plan, facts)
    return MemoryDecision(
        decision=Decision(
            action=Action.restart_with_plan_change, reason=f"{start}, with {settings}, because {why}"
        ),
        change=change,
    )


def _changed_in_vain(history: History, shortage: Shortage) -> bool:
    """Whether the plan was changed for this request before."""
    return any(
        recovery.action == str(Action.restart_with_plan_change) and shortage.repeats(recovery.shortage)
        for recovery in history.recoveries[:-1]
    )


def _next(history: History, situation: Situation, *, futile: bool) -> PlanChange | Exhausted:
    plan = history.memory.plan
    if futile:
        return Exhausted(
            skipped=(),
            proposals=proposals(situation, plan),
            why=(
                f"{situation.shortage.line.rpartition('/')[2]} asked for the same again after the memory plan"
                " was changed"
            ),
        )
    return next_change(situation, plan)


def _restart_once(situation: Situation, cause: str) -> MemoryDecision:
    return _restart(situation, f"with the same memory plan once, because {cause}")


def _restart(situation: Situation, how: str) -> MemoryDecision:
    return MemoryDecision(decision=Decision(action=Action.restart, reason=f"{situation.start}, {how}"))


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


def _stop(reason: str) -> MemoryDecision:
    return MemoryDecision(decision=Decision(action=Action.stop, reason=reason))
