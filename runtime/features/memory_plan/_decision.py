"""The decision after a rank has run out of GPU memory: change the plan, restart once, or give up; and after
generation has not returned in time twice at one step: generate in smaller calls.

A change of plan spends no restart budget, because the number of remedies bounds it. An unchanged restart
frees what was cached. It is tried once for a plan and a phase, if that may suffice: the allocator had
reserved enough (fragmentation), or no phase of a trainer was open, so that no plan makes the request smaller.
It spends the budget like any other restart. Where the script itself asks for the same again
after a change, no further change is made. Also builds the sentences for the terminal. Called by
`supervisor.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.features.memory_plan._remedies import (
    COMPLETIONS,
    GENERATION_PARTS,
    REMEDIES,
    SEGMENTS,
    in_settings,
)
from grpo_run.runtime.features.memory_plan._remedy import Plan, Refused, Remedy, Situation
from grpo_run.runtime.features.memory_plan.shown import ACTION
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision, Recovery
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.shortage import OUTSIDE, MemoryPhase


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """What the next attempt does otherwise.

    Attributes:
        phase: that died.
        remedy: the one change.
        plan: with the change.
        skipped: earlier remedies by name, each with why it does not apply, as a clause.
        inexact: why the update is not the same; empty if it is, up to the rounding of sums.
        why: why the plan changes, if not for want of memory.
    """

    phase: MemoryPhase
    remedy: Remedy
    plan: dict[str, Any]
    skipped: dict[str, str]
    inexact: tuple[str, ...]
    why: str = ""

    def sentences(self, before: Plan, facts: MemoryFacts) -> Iterator[str]:
        """Yield what the change does, why nothing before it was done, and what it costs in exactness."""
        text = in_settings(before, self.plan, facts)
        yield f"memory plan: {text}; {self.why}" if self.why else f"memory plan: {text}"
        if self.skipped:
            yield f"memory plan: not changed: {_skipped_text(self.skipped)}"
        if self.inexact:
            yield f"memory plan: the update is not exactly the same: {'; '.join(self.inexact)}"


def _skipped_text(skipped: dict[str, str]) -> str:
    return "; ".join(f"{name.replace('_', ' ')}: {why}" for name, why in skipped.items())


@dataclass(frozen=True, kw_only=True)
class MemoryDecision:
    """What follows, and how it was found.

    Attributes:
        decision: for the agent and the journal.
        change: of the plan; None if it stays.
    """

    decision: Decision
    change: PlanChange | None = None


def _change(
    remedy: Remedy, value: object, plan: Plan, facts: MemoryFacts, phase: MemoryPhase, why: str = ""
) -> PlanChange:
    return PlanChange(
        phase=phase,
        remedy=remedy,
        plan={**plan, remedy.field: value},
        skipped={},
        inexact=remedy.differences(facts),
        why=why,
    )


def next_change(situation: Situation) -> PlanChange | str:
    """Return the next change of the plan, or why none is left and what the user could change."""
    tried = [remedy for remedy in REMEDIES if remedy.is_tried(situation)]
    skipped: dict[str, str] = {}
    for remedy in sorted(tried, key=lambda one: not one.comes_first(situation)):
        value = remedy.next(situation)
        if isinstance(value, Refused):
            skipped[remedy.name] = value
        elif value is not None:
            change = _change(remedy, value, situation.plan, situation.facts, situation.phase)
            change.skipped.update(skipped)
            return change
    none_left = "no change of the memory plan is left that keeps the update"
    return _with_proposals(situation, f"{none_left} ({_skipped_text(skipped)})" if skipped else none_left)


def _with_proposals(situation: Situation, text: str) -> str:
    proposals = " or ".join(COMPLETIONS.proposed(situation))
    return f"{text}. What would change the experiment: {proposals}" if proposals else text


def decide_out_of_memory(history: History, situation: Situation) -> MemoryDecision:
    """Return what follows an out-of-memory error of a GPU.

    Args:
        history: contains this incident as its last recovery.
        situation: the error.
    """
    if situation.budget == 0:
        return _stop("restarts are switched off (--max-restarts 0)")
    phase = situation.phase
    futile = _changed_in_vain(history, situation)
    within_budget = history.failures_without_progress <= situation.budget
    once = within_budget and not futile and not _restarted_unchanged(history, phase)
    if once and phase in OUTSIDE:
        return _restart_once(situation, "no phase of a trainer has asked for the memory")
    if futile:
        line = situation.shortage.line.rpartition("/")[2]
        found: PlanChange | str = _with_proposals(
            situation, f"{line} asked for the same again after the memory plan was changed"
        )
    else:
        found = next_change(situation)
    segments = isinstance(found, PlanChange) and found.remedy is SEGMENTS
    if once and situation.fragmented and not segments:
        return _restart_once(situation, "memory was fragmented, and a restart frees it")
    if isinstance(found, PlanChange):
        return _changed(found, situation.start, situation.facts)
    if situation.proceeds and history.failures_without_progress <= 1:
        # each attempt gets further: giving up would lose a run that proceeds
        return _restart(
            situation, "with the same memory plan, because the run makes progress and no change is left"
        )
    return _stop(found)


def decide_generation_stall(
    history: History, facts: MemoryFacts, plan: Plan, *, start: str, budget: int
) -> MemoryDecision | None:
    """Return the restart with smaller calls of generation, after it has not returned twice at one step; None
    in any other case: the first time, and if smaller calls did not help either.

    Args:
        history: contains this stall as its last recovery.
        plan: in effect.
        start: where a restart continues, as a clause.
        budget: failures without progress that are recovered.
    """
    if len(history.recoveries) < 2 or history.failures_without_progress > budget:
        return None
    before, now = history.recoveries[-2:]
    same = (before.cause, before.train_call, before.step) == (now.cause, now.train_call, now.step)
    parts = GENERATION_PARTS.after(facts, plan)
    if not same or before.action != str(Action.restart) or parts is None or isinstance(parts, Refused):
        return None
    why = "generation has not returned in time twice at this step"
    change = _change(GENERATION_PARTS, parts, plan, facts, MemoryPhase.generate, why)
    return _changed(change, start, facts, f", because {why}")


def _changed(change: PlanChange, start: str, facts: MemoryFacts, because: str = "") -> MemoryDecision:
    settings = in_settings({}, change.plan, facts)
    decision = Decision(action=ACTION, reason=f"{start}, with {settings}{because}", patient=True)
    return MemoryDecision(decision=decision, change=change)


def _changed_in_vain(history: History, situation: Situation) -> bool:
    """Whether the plan was changed for this request before."""
    return any(
        recovery.action == ACTION and situation.shortage.repeats(recovery.shortage)
        for recovery in history.recoveries[:-1]
    )


def _restarted_unchanged(history: History, phase: MemoryPhase) -> bool:
    """Whether the present plan has had its unchanged restart after memory was exhausted in a phase."""
    return any(
        recovery.cause == str(Cause.gpu_oom)
        and recovery.action == str(Action.restart)
        and recovery.shortage.get("phase") == str(phase)
        for recovery in _since_last_change(history)
    )


def _since_last_change(history: History) -> Iterator[Recovery]:
    """Yield the faults of this launch, in which the user may have given a plan, before the present one and
    with the present plan.
    """
    for recovery in reversed(history.recoveries[history.recoveries_at_start : -1]):
        if recovery.action == ACTION:
            return
        yield recovery


def _restart_once(situation: Situation, cause: str) -> MemoryDecision:
    return _restart(situation, f"with the same memory plan once, because {cause}")


def _restart(situation: Situation, how: str) -> MemoryDecision:
    return MemoryDecision(decision=Decision(action=Action.restart, reason=f"{situation.start}, {how}"))


def _stop(reason: str) -> MemoryDecision:
    return MemoryDecision(decision=Decision(action=Action.stop, reason=reason))
