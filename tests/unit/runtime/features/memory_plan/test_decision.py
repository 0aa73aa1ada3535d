"""What follows an out-of-memory error: another plan, one restart without a change, or the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.journal import event
from support.memory_cases import COLOCATED, GRPO, facts

from grpo_run.runtime.features.memory_plan._decision import (
    MemoryDecision,
    decide_generation_stall,
    decide_out_of_memory,
)
from grpo_run.runtime.features.memory_plan._remedy import Situation
from grpo_run.runtime.features.memory_plan.events import PlanRecord
from grpo_run.runtime.features.memory_plan.shown import ACTION as CHANGE
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase, Shortage

GIB = 1 << 30
FRAGMENTED = Figures(tried_bytes=GIB, unallocated_bytes=10 * GIB)
UNKNOWN = Figures(tried_bytes=2 * GIB)
FULL = Figures(tried_bytes=2 * GIB, free_bytes=GIB, unallocated_bytes=1 << 20)


def situation(
    phase: MemoryPhase = MemoryPhase.backward, figures: Figures = FULL, **changed: Any
) -> Situation:
    shortage = Shortage(
        cause=Cause.gpu_oom,
        source=ErrorSource.allocator,
        phase=phase,
        text="CUDA out of memory.",
        figures=figures,
    )
    given = Situation(shortage=shortage, facts=GRPO, plan={}, start="restart from checkpoint-6", budget=3)
    return replace(given, **changed)


class Story:
    """A run that goes from one out-of-memory error to the next, journaled as the supervisor does."""

    def __init__(self, **plan: Any) -> None:
        self.record = PlanRecord(plan=plan)
        self.history = History(parts=(self.record,))
        self.apply("run_started")

    def apply(self, name: str, **fields: Any) -> None:
        self.history.apply(event(name, **fields))

    def out_of_memory(self, given: Situation) -> MemoryDecision:
        self.apply("incident", cause="gpu_oom", step=7, shortage=given.shortage.as_json())
        found = decide_out_of_memory(self.history, replace(given, plan=self.record.plan))
        decision = found.decision
        self.apply("action", action=str(decision.action), reason="", patient=decision.patient)
        if found.change is not None:
            plan = found.change.plan
            self.apply("plan_changed", plan=plan, inexact=list(found.change.inexact))
        return found

    def checkpoint(self, step: int) -> None:
        self.apply("checkpoint_published", step=step, path="p", train_call=1)


def test_a_full_gpu_changes_the_plan_and_never_restarts_unchanged() -> None:
    found = Story().out_of_memory(situation())
    assert found.decision.action == CHANGE
    assert "per_device_train_batch_size 8 -> 4, gradient_accumulation_steps 1 -> 2" in found.decision.reason


def test_changes_of_plan_spend_no_budget_and_the_fallback_steps_bound_them() -> None:
    story = Story()
    actions = []
    while not actions or actions[-1] is not Action.stop:
        actions.append(story.out_of_memory(situation(budget=1)).decision.action)
        assert len(actions) < 20
    assert actions[:-1] == [CHANGE] * 4
    assert story.history.failures_without_progress == 1, "only the failure that ended the run"


def test_fragmentation_is_answered_by_expandable_segments_then_by_one_unchanged_restart() -> None:
    story = Story()
    found = [story.out_of_memory(situation(figures=FRAGMENTED)) for _ in range(3)]
    assert [one.decision.action for one in found] == [CHANGE, Action.restart, CHANGE]
    assert [one.change.remedy.name for one in found if one.change] == ["expandable_segments", "micro_batch"]


def test_memory_that_has_grown_is_freed_by_one_unchanged_restart() -> None:
    story = Story()
    actions = [story.out_of_memory(situation(grown_bytes=GIB)).decision.action for _ in range(2)]
    assert actions == [Action.restart, CHANGE]


def test_memory_that_has_grown_by_less_than_was_missing_is_no_reason_to_restart_unchanged() -> None:
    found = Story().out_of_memory(situation(grown_bytes=GIB // 2))
    assert found.decision.action == CHANGE


def test_without_a_fallback_step_left_the_run_ends_and_it_is_said_why() -> None:
    story = Story(generation_sub_batches=8, expandable_segments=True)
    found = story.out_of_memory(situation(MemoryPhase.generate))
    assert found.decision.action is Action.stop
    for words in ("generation sub batches: ", "shorter completions", "--allow-degrade"):
        assert words in found.decision.reason


def test_a_user_who_allows_it_gets_shorter_completions_instead_of_the_end() -> None:
    story = Story(generation_sub_batches=8, expandable_segments=True)
    found = story.out_of_memory(situation(MemoryPhase.generate, allow_degrade=True))
    assert found.change is not None
    assert found.change.plan["max_completion_length"] == 256
    assert any("shorter" in reason for reason in found.change.inexact)


def test_a_run_that_gets_further_each_time_is_not_given_up() -> None:
    story = Story(expandable_segments=True)
    nothing_left = situation(MemoryPhase.save, proceeds=True)
    for step in (10, 20, 30):
        assert story.out_of_memory(nothing_left).decision.action is Action.restart
        story.checkpoint(step)
    assert story.out_of_memory(nothing_left).decision.action is Action.restart
    assert story.out_of_memory(nothing_left).decision.action is Action.stop


NO_TRAINER = [MemoryPhase.reward, MemoryPhase.callback, MemoryPhase.script, MemoryPhase.unknown]


@pytest.mark.parametrize("phase", NO_TRAINER)
def test_without_a_phase_of_a_trainer_a_restart_as_it_is_comes_first_and_the_micro_batch_stays(
    phase: MemoryPhase,
) -> None:
    """The weights are then equal. A second failure is answered by what leaves more memory free."""
    story = Story()
    given = situation(phase, figures=UNKNOWN, facts=facts(**COLOCATED))
    found = [story.out_of_memory(given) for _ in range(3)]
    assert [one.change.remedy.name if one.change else one.decision.action for one in found] == [
        Action.restart,
        "vllm_sleep",
        Action.restart,
    ]
    assert "micro_batch_divisor" not in story.record.plan


def test_expandable_segments_are_not_tried_where_they_free_too_little() -> None:
    story = Story()
    actions = [story.out_of_memory(situation(MemoryPhase.callback)).decision.action for _ in range(2)]
    assert actions == [Action.restart, Action.stop]


def always(phase: MemoryPhase, *free_gib: int) -> list[str]:
    """What follows 40 GiB that are asked for again and again at one line, with so much free."""
    story = Story()
    found = []
    for free in free_gib:
        figures = Figures(tried_bytes=40 * GIB, free_bytes=free * GIB)
        given = situation(phase, figures, facts=facts(**COLOCATED))
        given = replace(given, shortage=replace(given.shortage, line="/home/u/train.py:7"))
        found.append(story.out_of_memory(given))
    return [one.decision.action for one in found]


@pytest.mark.parametrize(
    ("phase", "actions"),
    [
        (MemoryPhase.reward, [Action.restart, CHANGE, Action.stop]),
        (MemoryPhase.script, [Action.restart, CHANGE, Action.stop]),
        (MemoryPhase.optimizer, [CHANGE, Action.stop]),
        (MemoryPhase.forward, [CHANGE, Action.stop]),
        (MemoryPhase.generate, [CHANGE, Action.stop]),
    ],
)
def test_the_same_request_at_the_same_line_after_a_change_ends_the_run(
    phase: MemoryPhase, actions: list[str]
) -> None:
    assert always(phase, *[1] * len(actions)) == actions


def test_a_run_that_proceeds_is_restarted_as_it_is_and_its_plan_is_not_changed_again() -> None:
    """A callback that fails every 25 steps: vLLM's share is not lowered for it again and again."""
    story = Story()
    given = situation(MemoryPhase.callback, UNKNOWN, facts=facts(**COLOCATED), proceeds=True)
    given = replace(given, shortage=replace(given.shortage, line="/home/u/train.py:7"))
    found = []
    for step in (25, 50, 75, 100):
        found.append(story.out_of_memory(given).decision.action)
        story.checkpoint(step)
    assert found == [Action.restart, CHANGE, Action.restart, Action.restart]


def test_a_change_that_has_left_more_memory_for_the_request_is_followed_by_the_next() -> None:
    assert always(MemoryPhase.generate, 1, 20, 20) == [CHANGE, CHANGE, Action.stop]


def test_a_user_who_wants_no_restart_gets_none() -> None:
    found = Story().out_of_memory(situation(budget=0))
    assert found.decision.action is Action.stop
    assert "--max-restarts 0" in found.decision.reason


def stalled(*actions: str, steps: tuple[int, ...] | None = None) -> History:
    """A run whose generation has not returned in time at each of these steps, after such actions."""
    story = Story()
    for number, step in enumerate(steps or (7,) * (len(actions) + 1)):
        story.apply("incident", cause="generation_stall", step=step)
        if number < len(actions):
            story.apply("action", action=actions[number], reason="", patient=actions[number] == CHANGE)
    return story.history


def stall_decision(history: History, budget: int = 3, **changed: Any) -> MemoryDecision | None:
    given = facts(**changed) if changed else GRPO
    return decide_generation_stall(history, given, {}, start="from checkpoint-6", budget=budget)


def test_generation_that_stalls_twice_at_a_step_is_made_in_smaller_calls() -> None:
    decision = stall_decision(stalled("restart"))
    assert decision is not None
    assert decision.change is not None
    assert decision.decision.action == CHANGE
    assert decision.change.plan == {"generation_sub_batches": 2}
    said = [*decision.change.sentences({}, GRPO)]
    assert said[0] == (
        "memory plan: generation in 2 parts; generation has not returned in time twice at this step"
    )
    assert "sampling in smaller batches gives different completions" in said[1]


@pytest.mark.parametrize(
    "history",
    [stalled(), stalled("restart", CHANGE), stalled("restart", steps=(7, 9))],
    ids=["once", "in smaller calls already", "at two steps"],
)
def test_other_stalls_of_generation_change_no_plan(history: History) -> None:
    assert stall_decision(history) is None


def test_generation_by_vllm_is_not_divided_after_stalls() -> None:
    assert stall_decision(stalled("restart"), **COLOCATED) is None


def test_stalls_beyond_the_budget_change_no_plan() -> None:
    assert stall_decision(stalled("restart"), budget=1) is None
