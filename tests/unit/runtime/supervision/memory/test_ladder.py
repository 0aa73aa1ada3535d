"""The ladder: the next change of the memory plan after a rank ran out of memory in a phase."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory_cases import COLOCATED, GRPO, SFT, facts

from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.memory.ladder import Exhausted, PlanChange, next_change
from grpo_run.runtime.supervision.memory.prediction import Device
from grpo_run.runtime.supervision.memory.rungs import Rung, Surroundings
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase


def climb(
    phase: MemoryPhase,
    given: MemoryFacts = GRPO,
    plan: MemoryPlan | None = None,
    *,
    around: Surroundings | None = None,
    device: Device | None = None,
    **more: bool,
) -> PlanChange | Exhausted:
    return next_change(
        phase, given, plan or MemoryPlan(), around=around or Surroundings(), device=device or Device(), **more
    )


def plans(phase: MemoryPhase, given: MemoryFacts, **more: bool) -> list[str]:
    """Return the plans of a run whose every attempt runs out of memory in one phase."""
    plan, texts = MemoryPlan(), []
    while isinstance(change := climb(phase, given, plan, **more), PlanChange):
        plan = change.plan
        assert plan.text not in texts, "a plan comes back, and the ladder would have no end"
        texts.append(plan.text)
    return texts


BATCH_PHASES = [MemoryPhase.score, MemoryPhase.forward, MemoryPhase.backward]


@pytest.mark.parametrize("phase", BATCH_PHASES)
@pytest.mark.parametrize("given", [GRPO, SFT])
def test_phases_of_a_micro_batch_halve_it_first(phase: MemoryPhase, given: MemoryFacts) -> None:
    change = climb(phase, given)
    assert isinstance(change, PlanChange)
    assert change.plan == MemoryPlan(micro_batch_divisor=2)
    assert change.prediction.lowers
    assert not change.inexact


def test_a_micro_batch_is_halved_until_it_is_one_sample_and_then_the_next_rung_follows() -> None:
    assert plans(MemoryPhase.backward, GRPO) == [
        "micro_batch_divisor=2",
        "micro_batch_divisor=4",
        "micro_batch_divisor=8",
        "micro_batch_divisor=8 gradient_checkpointing=True",
        "micro_batch_divisor=8 gradient_checkpointing=True expandable_segments=True",
    ]


@pytest.mark.parametrize(
    ("rows", "said"), [(1, "one sample already"), (3, "is odd"), (6, None)], ids=["one", "odd", "even"]
)
def test_a_micro_batch_that_cannot_be_halved_leaves_it_to_the_next_rung(rows: int, said: str | None) -> None:
    change = climb(MemoryPhase.backward, facts(per_device_train_batch_size=rows))
    assert isinstance(change, PlanChange)
    assert change.rung is (Rung.micro_batch if said is None else Rung.gradient_checkpointing)
    assert [said in skipped.why for skipped in change.skipped if said] == ([True] if said else [])


def test_a_size_of_six_is_halved_once() -> None:
    change = climb(
        MemoryPhase.backward, facts(per_device_train_batch_size=6), MemoryPlan(micro_batch_divisor=2)
    )
    assert isinstance(change, PlanChange)
    assert change.rung is Rung.gradient_checkpointing


def test_gradient_checkpointing_is_not_climbed_for_scoring_which_keeps_no_activations() -> None:
    change = climb(MemoryPhase.score, facts(per_device_train_batch_size=1))
    assert isinstance(change, PlanChange)
    assert change.rung is Rung.expandable_segments
    skipped = {one.rung: one.why for one in change.skipped}
    assert "would not lower the peak" in skipped[Rung.gradient_checkpointing]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"loss_type": "bnpo"}, "bnpo"),
        ({"entropy_bonus": True}, "entropy bonus"),
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2"),
        ({"auxiliary_loss": True}, "experts"),
        ({"explicit_sizes": ("train_batch_size in DeepSpeed's configuration",)}, "DeepSpeed"),
    ],
)
def test_each_refusal_of_a_split_is_named_and_the_next_rung_is_climbed(
    changed: dict[str, Any], words: str
) -> None:
    change = climb(MemoryPhase.backward, facts(**changed))
    assert isinstance(change, PlanChange)
    assert change.rung is Rung.gradient_checkpointing
    assert change.plan.micro_batch_divisor == 1
    assert words in change.skipped[0].text


def test_generation_is_split_into_parts_and_other_samples_are_said() -> None:
    assert plans(MemoryPhase.generate, GRPO)[:3] == [f"generation_sub_batches={parts}" for parts in (2, 4, 8)]
    sampled, greedy = climb(MemoryPhase.generate), climb(MemoryPhase.generate, facts(greedy=True))
    assert isinstance(sampled, PlanChange)
    assert isinstance(greedy, PlanChange)
    assert any("sampled" in reason for reason in sampled.inexact)
    assert greedy.inexact == ()


def test_dropout_and_a_ragged_last_batch_are_said_to_be_inexact() -> None:
    dropout = climb(MemoryPhase.forward, facts(dropout=True))
    ragged = climb(MemoryPhase.forward, facts(SFT, samples=63))
    assert isinstance(dropout, PlanChange)
    assert isinstance(ragged, PlanChange)
    assert any("dropout" in reason for reason in dropout.inexact)
    assert any("last batch" in reason for reason in ragged.inexact)


def test_the_optimizer_is_offloaded_with_deepspeed_only() -> None:
    zero = climb(MemoryPhase.optimizer, facts(deepspeed=True, layout="deepspeed-zero2"))
    assert isinstance(zero, PlanChange)
    assert zero.plan == MemoryPlan(optimizer_offload=True)
    replicated = climb(MemoryPhase.optimizer)
    assert isinstance(replicated, PlanChange)
    assert replicated.plan == MemoryPlan(expandable_segments=True)


def test_a_smaller_micro_batch_is_never_the_answer_to_the_optimizer_or_to_generation() -> None:
    for phase in (MemoryPhase.optimizer, MemoryPhase.generate, MemoryPhase.save, MemoryPhase.load):
        assert not any("micro_batch" in text for text in plans(phase, GRPO)), phase


def test_vllm_gives_up_a_part_of_its_share_in_generation_and_sleeps_for_the_optimizer() -> None:
    generation = climb(MemoryPhase.generate, facts(**COLOCATED))
    optimizer = climb(MemoryPhase.optimizer, facts(**COLOCATED))
    assert isinstance(generation, PlanChange)
    assert isinstance(optimizer, PlanChange)
    assert generation.plan == MemoryPlan(vllm_gpu_memory_utilization=0.2)
    assert optimizer.plan == MemoryPlan(vllm_sleep=True)


def test_a_cache_that_is_too_small_gets_a_larger_share_and_no_less_memory() -> None:
    change = climb(MemoryPhase.load, facts(**COLOCATED), cache_too_small=True)
    assert isinstance(change, PlanChange)
    assert change.plan == MemoryPlan(vllm_gpu_memory_utilization=0.45)


def test_a_share_of_vllm_never_goes_up_after_it_went_down_or_down_after_it_went_up() -> None:
    lowered = climb(
        MemoryPhase.load,
        facts(**COLOCATED),
        MemoryPlan(vllm_gpu_memory_utilization=0.2),
        cache_too_small=True,
    )
    raised = climb(MemoryPhase.generate, facts(**COLOCATED), MemoryPlan(vllm_gpu_memory_utilization=0.45))
    assert isinstance(lowered, Exhausted)
    assert isinstance(raised, PlanChange)
    assert raised.rung is Rung.expandable_segments


def test_expandable_segments_come_first_for_fragmented_memory() -> None:
    change = climb(MemoryPhase.backward, fragmented=True)
    assert isinstance(change, PlanChange)
    assert change.plan == MemoryPlan(expandable_segments=True)


@pytest.mark.parametrize(
    "around",
    [Surroundings(segments_refused="this version of vLLM"), Surroundings(own_allocator_setting=True)],
    ids=["vllm", "user"],
)
def test_expandable_segments_are_left_out_where_they_do_not_work_or_the_user_decides(
    around: Surroundings,
) -> None:
    asleep = facts(**COLOCATED, vllm_sleep=True)
    change = climb(MemoryPhase.backward, asleep, around=around, fragmented=True)
    assert isinstance(change, PlanChange)
    assert change.rung is Rung.micro_batch


def test_expandable_segments_are_left_out_if_nothing_is_reserved_in_vain() -> None:
    full = Device(unallocated_bytes=0)
    assert isinstance(climb(MemoryPhase.optimizer, device=full), Exhausted)


def test_completions_are_shortened_only_if_the_user_allows_it_and_after_everything_else() -> None:
    strict = plans(MemoryPhase.generate, GRPO)
    degraded = plans(MemoryPhase.generate, GRPO, allow_degrade=True)
    assert degraded[: len(strict)] == strict
    assert not any("max_completion_length" in text for text in strict)
    assert degraded[-1].endswith("max_completion_length=16")


def test_an_exhausted_ladder_proposes_what_would_change_the_experiment() -> None:
    plan = MemoryPlan(generation_sub_batches=8, expandable_segments=True)
    end = climb(MemoryPhase.generate, GRPO, plan)
    assert isinstance(end, Exhausted)
    assert [proposal.split(" (")[0] for proposal in end.proposals] == [
        "shorter completions",
        "fewer generations",
    ]
    assert all(skipped.why for skipped in end.skipped)


@pytest.mark.parametrize("phase", list(MemoryPhase))
@pytest.mark.parametrize(
    "given",
    [
        GRPO, SFT, facts(**COLOCATED), facts(**COLOCATED, vllm_sleep=True), facts(per_device_train_batch_size=1024),
        facts(deepspeed=True, layout="deepspeed-zero3"),
    ],
)  # fmt: skip
def test_every_ladder_ends(phase: MemoryPhase, given: MemoryFacts) -> None:
    assert len(plans(phase, given, allow_degrade=True)) < 30
