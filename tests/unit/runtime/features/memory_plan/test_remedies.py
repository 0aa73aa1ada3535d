"""The next change of the memory plan after a rank ran out of memory in a phase."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory_cases import COLOCATED, GRPO, SFT, facts, planned

from grpo_run.runtime.features.memory_plan._decision import PlanChange, next_change
from grpo_run.runtime.features.memory_plan._remedies import text_of
from grpo_run.runtime.features.memory_plan._remedy import Plan, Situation
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase, Shortage

FULL = Figures(unallocated_bytes=0)
FRAGMENTED = Figures(tried_bytes=1 << 30, unallocated_bytes=10 << 30)


def apply_step(
    phase: MemoryPhase,
    given: MemoryFacts = GRPO,
    plan: Plan | None = None,
    *,
    figures: Figures | None = None,
    source: ErrorSource = ErrorSource.allocator,
    **more: Any,
) -> PlanChange | str:
    shortage = Shortage(
        cause=Cause.gpu_oom, source=source, phase=phase, text="out of memory", figures=figures or Figures()
    )
    return next_change(Situation(shortage=shortage, facts=given, plan=plan or {}, start="", budget=3, **more))


def change_of(*arguments: Any, **more: Any) -> PlanChange:
    """Return the change that is made."""
    found = apply_step(*arguments, **more)
    assert isinstance(found, PlanChange)
    return found


def plans(phase: MemoryPhase, given: MemoryFacts, begin: Plan | None = None, **more: bool) -> list[str]:
    """Return the plans of a run whose every attempt runs out of memory in one phase."""
    plan, texts = dict(begin or {}), []
    while isinstance(change := apply_step(phase, given, plan, **more), PlanChange):
        plan = change.plan
        assert text_of(plan) not in texts, "a plan comes back, and the steps would have no end"
        texts.append(text_of(plan))
    return texts


BATCH_PHASES = [MemoryPhase.score, MemoryPhase.forward, MemoryPhase.backward]


@pytest.mark.parametrize("phase", BATCH_PHASES)
@pytest.mark.parametrize("given", [GRPO, SFT])
def test_phases_of_a_micro_batch_halve_it_first(phase: MemoryPhase, given: MemoryFacts) -> None:
    change = change_of(phase, given)
    assert change.plan == planned(micro_batch_divisor=2)
    assert not change.inexact


def test_a_micro_batch_is_halved_until_it_is_one_sample_and_then_the_next_step_follows() -> None:
    assert plans(MemoryPhase.backward, GRPO) == [
        "micro-batch=2",
        "micro-batch=4",
        "micro-batch=8",
        "micro-batch=8,checkpointing",
        "micro-batch=8,checkpointing,expandable-segments",
    ]


@pytest.mark.parametrize(
    ("rows", "said"), [(1, "one sample already"), (3, "is odd"), (6, None)], ids=["one", "odd", "even"]
)
def test_a_micro_batch_that_cannot_be_halved_leaves_it_to_the_next_step(rows: int, said: str | None) -> None:
    change = change_of(MemoryPhase.backward, facts(per_device_train_batch_size=rows))
    assert change.remedy.name == ("micro_batch" if said is None else "gradient_checkpointing")
    assert [said in why for why in change.skipped.values() if said] == ([True] if said else [])


def test_gradient_checkpointing_is_not_taken_for_scoring_which_keeps_no_activations() -> None:
    change = change_of(MemoryPhase.score, facts(per_device_train_batch_size=1))
    assert change.remedy.name == "expandable_segments"


def test_a_refused_split_is_named_and_the_next_step_is_taken() -> None:
    """Why a split is refused is tested with `split_refusals`."""
    change = change_of(MemoryPhase.backward, facts(loss_type="bnpo"))
    assert change.remedy.name == "gradient_checkpointing"
    assert change.plan == {"gradient_checkpointing": True}
    assert "bnpo" in change.skipped["micro_batch"]


def test_checkpointing_that_the_script_sets_later_is_left_to_it() -> None:
    """A plan would not take effect, and the run would end."""
    change = change_of(
        MemoryPhase.backward, facts(explicit_sizes=("an assignment",), checkpointing_set_later=True)
    )
    assert change.remedy.name == "expandable_segments"


def test_generation_is_split_into_parts_and_other_samples_are_said() -> None:
    assert plans(MemoryPhase.generate, GRPO)[:3] == [f"sub-batches={parts}" for parts in (2, 4, 8)]
    sampled, greedy = change_of(MemoryPhase.generate), change_of(MemoryPhase.generate, facts(greedy=True))
    assert any("different completions" in reason for reason in sampled.inexact)
    assert greedy.inexact == ()


def test_dropout_and_a_ragged_last_batch_are_said_to_be_inexact() -> None:
    dropout = change_of(MemoryPhase.forward, facts(dropout=True))
    ragged = change_of(MemoryPhase.forward, facts(SFT, samples=63))
    assert any("dropout" in reason for reason in dropout.inexact)
    assert any("last batch" in reason for reason in ragged.inexact)


def test_the_optimizer_is_offloaded_with_deepspeed_only() -> None:
    zero = change_of(MemoryPhase.optimizer, facts(deepspeed=True, layout="deepspeed-zero2"))
    assert zero.plan == planned(optimizer_offload=True)
    replicated = change_of(MemoryPhase.optimizer)
    assert replicated.plan == planned(expandable_segments=True)


def test_a_smaller_micro_batch_is_never_the_answer_to_the_optimizer_or_to_generation() -> None:
    for phase in (MemoryPhase.optimizer, MemoryPhase.generate, MemoryPhase.save, MemoryPhase.load):
        assert not any("micro-batch" in text for text in plans(phase, GRPO)), phase


def test_vllm_gives_up_a_part_of_its_share_in_generation_and_sleeps_for_the_optimizer() -> None:
    generation = change_of(MemoryPhase.generate, facts(**COLOCATED))
    optimizer = change_of(MemoryPhase.optimizer, facts(**COLOCATED))
    assert generation.plan == planned(vllm_gpu_memory_utilization=0.2)
    assert optimizer.plan == planned(vllm_sleep=True)


def test_a_colocated_vllm_gives_up_its_share_before_it_sleeps_and_nothing_else_changes() -> None:
    """Parts and micro-batches do nothing for what vLLM allocates, or for the weights that it is sent."""
    shares = [f"vllm-share={share}" for share in (0.2, 0.13, 0.1)]
    given = facts(**COLOCATED)
    assert plans(MemoryPhase.generate, given) == [*shares, "vllm-sleep,vllm-share=0.1"]
    assert plans(MemoryPhase.generate, facts(given, vllm_sleep=True)) == shares
    assert not any("sleep" in text for text in plans(MemoryPhase.load, given))


@pytest.mark.parametrize(
    ("changed", "plan", "own", "why"),
    [
        (
            {"vllm_wakes_with_weights": False},
            {},
            False,
            "before TRL 1.10 vLLM has the weights of the model's",
        ),
        ({}, planned(expandable_segments=True), False, "vLLM may refuse to sleep with expandable segments"),
        ({}, {}, True, "vLLM may refuse to sleep with expandable segments"),
    ],
    ids=["old TRL", "segments of the plan", "segments of the user"],
)
def test_vllm_does_not_sleep_where_it_would_learn_nothing_or_not_start(
    changed: dict[str, Any], plan: Plan, own: bool, why: str
) -> None:
    """The next change is made instead, and no plan of these runs ever has it."""
    given = facts(**COLOCATED, **changed)
    change = change_of(MemoryPhase.optimizer, given, plan, own_allocator_setting=own)
    assert (change.remedy.name, change.plan["vllm_gpu_memory_utilization"]) == ("vllm_share", 0.2)
    assert change.skipped["vllm_sleep"].startswith(why)
    for phase in MemoryPhase:
        assert not any("sleep" in text for text in plans(phase, given, plan, own_allocator_setting=own))


def test_a_cache_that_is_too_small_gets_a_larger_share_and_no_less_memory() -> None:
    change = change_of(MemoryPhase.load, facts(**COLOCATED), source=ErrorSource.vllm_cache)
    assert change.plan == planned(vllm_gpu_memory_utilization=0.45)


def test_a_share_of_vllm_never_goes_up_after_it_went_down_or_down_after_it_went_up() -> None:
    lowered = apply_step(
        MemoryPhase.load,
        facts(**COLOCATED),
        planned(vllm_gpu_memory_utilization=0.2),
        source=ErrorSource.vllm_cache,
    )
    raised = apply_step(MemoryPhase.generate, facts(**COLOCATED), planned(vllm_gpu_memory_utilization=0.45))
    assert isinstance(lowered, str)
    assert isinstance(raised, PlanChange)
    assert raised.plan == planned(vllm_gpu_memory_utilization=0.45, vllm_sleep=True)


def test_expandable_segments_come_first_for_fragmented_memory() -> None:
    change = change_of(MemoryPhase.backward, figures=FRAGMENTED)
    assert change.plan == planned(expandable_segments=True)


@pytest.mark.parametrize(
    ("given", "own"), [(facts(**COLOCATED, vllm_sleep=True), False), (GRPO, True)], ids=["vllm", "user"]
)
def test_expandable_segments_are_left_out_while_vllm_sleeps_or_where_the_user_decides(
    given: MemoryFacts, own: bool
) -> None:
    change = change_of(MemoryPhase.backward, given, figures=FRAGMENTED, own_allocator_setting=own)
    assert change.remedy.name == "micro_batch"


def test_expandable_segments_are_left_out_if_nothing_is_reserved_in_vain() -> None:
    assert isinstance(apply_step(MemoryPhase.optimizer, figures=FULL), str)


def test_completions_are_shortened_only_if_the_user_allows_it_and_after_everything_else() -> None:
    strict = plans(MemoryPhase.generate, GRPO)
    degraded = plans(MemoryPhase.generate, GRPO, allow_degrade=True)
    assert degraded[: len(strict)] == strict
    assert not any("max_completion_length" in text for text in strict)
    assert degraded[-1].endswith("max_completion_length=16")


def test_without_a_fallback_step_left_changes_of_the_experiment_are_proposed() -> None:
    plan = planned(generation_sub_batches=8, expandable_segments=True)
    end = apply_step(MemoryPhase.generate, GRPO, plan)
    assert isinstance(end, str)
    assert "would change the experiment: shorter completions (" in end
    assert "generation sub batches: a part is one row already" in end


@pytest.mark.parametrize("phase", [MemoryPhase.optimizer, MemoryPhase.reward, MemoryPhase.save])
def test_nothing_is_proposed_that_does_not_lower_the_peak_of_the_phase(phase: MemoryPhase) -> None:
    end = apply_step(phase, GRPO, planned(expandable_segments=True), allow_degrade=True)
    assert isinstance(end, str)
    assert "would change the experiment" not in end


@pytest.mark.parametrize("asleep", [True, False], ids=["script", "plan"])
def test_a_smaller_share_is_left_out_where_vllm_sleeps_and_holds_nothing(asleep: bool) -> None:
    """While it generates it has its share, and gives a part of it up."""
    given, plan = facts(**COLOCATED, vllm_sleep=asleep), planned(vllm_sleep=not asleep)
    end = apply_step(MemoryPhase.optimizer, given, plan)
    assert isinstance(end, str)
    assert "has given its memory back" in end
    generation = change_of(MemoryPhase.generate, facts(given, generation_batch_size=2), plan)
    assert generation.plan["vllm_gpu_memory_utilization"] == 0.2


@pytest.mark.parametrize("phase", list(MemoryPhase))
@pytest.mark.parametrize(
    "given",
    [
        GRPO,
        SFT,
        facts(**COLOCATED),
        facts(**COLOCATED, vllm_sleep=True),
        facts(per_device_train_batch_size=1024),
        facts(deepspeed=True, layout="deepspeed-zero3"),
    ],
)
def test_fallback_steps_end(phase: MemoryPhase, given: MemoryFacts) -> None:
    assert len(plans(phase, given, allow_degrade=True)) < 30
