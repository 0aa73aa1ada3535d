"""The decision after a rank has run out of GPU memory: change the plan, restart unchanged once, or give up. Pure.

A change of plan spends no restart budget: the ladder's length bounds it. An unchanged restart frees what was cached, so it is
tried once for a plan and a phase, if that may suffice: the allocator had reserved enough (fragmentation), the attempt had done
the same work before and memory has grown since (creep), or no phase of a trainer was open, so that no plan makes the request smaller.
It spends the budget like any other. Where the script itself asks for the same again after a change, no further change is made.
Called by `run_memory.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_run.runtime.continuity.decision import Action, Decision
from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.record.history import History
from grpo_run.runtime.supervision.memory.ladder import (
    Exhausted,
    PlanChange,
    Tracer,
    next_change,
    no_traces,
    proposals,
)
from grpo_run.runtime.supervision.memory.prediction import GPU_BYTES, Device
from grpo_run.runtime.supervision.memory.rungs import Rung, Surroundings
from grpo_run.runtime.supervision.memory.sentences import plan_in_settings
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.out_of_memory.error_patterns import Source
from grpo_run.watchdog.out_of_memory.phases import OUTSIDE, MemoryPhase
from grpo_run.watchdog.out_of_memory.shortage import Shortage


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
    around: Surroundings
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
    def device(self) -> Device:
        """What the error says of the GPU."""
        figures = self.shortage.figures
        missing_bytes = None
        if figures.tried_bytes is not None and figures.free_bytes is not None:
            missing_bytes = max(0, figures.tried_bytes - figures.free_bytes)
        return Device(
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
    segments = isinstance(found, PlanChange) and found.rung is Rung.expandable_segments
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
            why=f"{shortage.line.rpartition('/')[2]} asked for the same again after the memory plan was changed",
        )
    return next_change(
        shortage.phase,
        facts,
        plan,
        around=situation.around,
        device=situation.device,
        fragmented=situation.fragmented,
        cache_too_small=shortage.source is Source.vllm_cache,
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
