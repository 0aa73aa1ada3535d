"""The closed form of a rank's peak of memory."""

from __future__ import annotations

import pytest
from support.memory_cases import COLOCATED, GRPO, facts

from grpo_run.runtime.memory.facts import ModelFacts
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.supervisor.memory._prediction import Traces, peak_bytes, predict
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase

NONE = Figures(unallocated_bytes=0)
HALF = MemoryPlan(micro_batch_divisor=2)


ACCUMULATED = facts(gradient_accumulation_steps=2, steps_per_generation=2)


@pytest.mark.parametrize("phase", [MemoryPhase.score, MemoryPhase.forward])
def test_half_a_micro_batch_halves_what_a_micro_batch_needs_and_no_more(phase: MemoryPhase) -> None:
    whole = peak_bytes(ACCUMULATED, phase, MemoryPlan(), NONE)
    half = peak_bytes(ACCUMULATED, phase, HALF, NONE)
    kept = 988_000_000 * (4 if phase is not MemoryPhase.score else 3)
    tile = 4096 * 32768 * 2  # of the head: both micro-batches have that many tokens, or half of them
    assert whole > half
    assert (whole - kept) == pytest.approx(2 * (half - kept), abs=tile)


def test_gradients_of_the_first_half_can_outweigh_what_a_smaller_half_saves() -> None:
    """They are freed before the forward pass of a step with one micro-batch, and alive in that of the second
    of two.
    """
    checkpointed = facts(gradient_checkpointing=True)
    assert not predict(checkpointed, MemoryPhase.forward, MemoryPlan(), HALF, NONE).lowers
    assert predict(
        facts(ACCUMULATED, gradient_checkpointing=True), MemoryPhase.forward, MemoryPlan(), HALF, NONE
    ).lowers


def test_traces_are_used_if_they_have_both_plans() -> None:
    traced = {MemoryPlan(): {"backward": 8.0e9}, HALF: {"backward": 5.0e9}}
    found = predict(GRPO, MemoryPhase.backward, MemoryPlan(), HALF, NONE, Traces(peaks=traced))
    assert (found.before_bytes, found.after_bytes, found.source) == (8_000_000_000, 5_000_000_000, "traced")
    one = Traces(peaks={MemoryPlan(): {"backward": 8.0e9}}, missing="it took more than 20 s")
    found = predict(GRPO, MemoryPhase.backward, MemoryPlan(), HALF, NONE, one)
    assert found == predict(GRPO, MemoryPhase.backward, MemoryPlan(), HALF, NONE, Traces(missing=one.missing))
    assert found.source == "closed form, not traced: it took more than 20 s"


def test_what_vllm_holds_and_what_is_fragmented_is_added_to_a_trace() -> None:
    traces = Traces(peaks={MemoryPlan(): {"backward": 8.0}, HALF: {"backward": 5.0}})
    figures = Figures(capacity_bytes=1000, unallocated_bytes=70)
    found = predict(facts(**COLOCATED), MemoryPhase.backward, MemoryPlan(), HALF, figures, traces)
    assert (found.before_bytes, found.after_bytes) == (378, 375)


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
    figures = Figures(capacity_bytes=80 << 30, unallocated_bytes=0)
    difference = peak_bytes(awake, MemoryPhase.backward, MemoryPlan(), figures) - peak_bytes(
        asleep, MemoryPhase.backward, MemoryPlan(), figures
    )
    assert difference == pytest.approx(24 << 30, rel=1e-6)


def test_figures_of_another_model_are_marked_as_such() -> None:
    unknown = predict(facts(model=ModelFacts()), MemoryPhase.forward, MemoryPlan(), HALF, NONE)
    assert unknown.nominal
    assert unknown.lowers
    assert not predict(GRPO, MemoryPhase.forward, MemoryPlan(), HALF, NONE).nominal
