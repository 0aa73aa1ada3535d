"""The closed form of a rank's peak of memory."""

from __future__ import annotations

import pytest
from support.memory_cases import COLOCATED, GRPO, facts

from grpo_run.runtime.continuity.memory_facts import ModelFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.memory.prediction import Device, peak_bytes, predict
from grpo_run.watchdog.out_of_memory.phases import MemoryPhase

NONE = Device(unallocated_bytes=0)
HALF = MemoryPlan(micro_batch_divisor=2)


@pytest.mark.parametrize("phase", [MemoryPhase.score, MemoryPhase.forward, MemoryPhase.backward])
def test_half_a_micro_batch_halves_what_a_micro_batch_needs_and_no_more(phase: MemoryPhase) -> None:
    none = peak_bytes(
        facts(per_device_train_batch_size=8, max_completion_length=1), phase, MemoryPlan(), NONE
    )
    whole = peak_bytes(GRPO, phase, MemoryPlan(), NONE)
    half = peak_bytes(GRPO, phase, HALF, NONE)
    assert none < whole
    kept = 988_000_000 * (4 if phase is not MemoryPhase.score else 3)
    assert (whole - kept) == pytest.approx(2 * (half - kept), rel=1e-6)


@pytest.mark.parametrize("phase", [MemoryPhase.optimizer, MemoryPhase.generate, MemoryPhase.save])
def test_a_smaller_micro_batch_does_not_lower_other_phases(phase: MemoryPhase) -> None:
    assert not predict(GRPO, phase, MemoryPlan(), HALF, NONE).lowers


def test_a_divisor_that_does_not_divide_lowers_nothing() -> None:
    assert not predict(
        facts(per_device_train_batch_size=3), MemoryPhase.forward, MemoryPlan(), HALF, NONE
    ).lowers


def test_state_that_is_sharded_over_ranks_counts_once() -> None:
    def state(layout: str) -> int:
        return peak_bytes(facts(layout=layout), MemoryPhase.save, MemoryPlan(), NONE)

    assert state("ddp") > state("deepspeed-zero1") > state("deepspeed-zero2") > state("deepspeed-zero3")
    assert state("deepspeed-zero3") == state("fsdp2") == 988_000_000 * 4 // 2


def test_what_vllm_reserves_counts_unless_it_sleeps() -> None:
    awake, asleep = facts(**COLOCATED), facts(**COLOCATED, vllm_sleep=True)
    device = Device(capacity_bytes=80 << 30, unallocated_bytes=0)
    difference = peak_bytes(awake, MemoryPhase.backward, MemoryPlan(), device) - peak_bytes(
        asleep, MemoryPhase.backward, MemoryPlan(), device
    )
    assert difference == pytest.approx(24 << 30, rel=1e-6)


def test_figures_of_another_model_are_marked_as_such() -> None:
    unknown = predict(facts(model=ModelFacts()), MemoryPhase.forward, MemoryPlan(), HALF, NONE)
    assert unknown.nominal
    assert unknown.lowers
    assert not predict(GRPO, MemoryPhase.forward, MemoryPlan(), HALF, NONE).nominal
