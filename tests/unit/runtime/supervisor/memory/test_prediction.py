"""What a change of plan does to the peak of a phase: by traces, or by what is in use beside the job."""

from __future__ import annotations

from typing import Any

import pytest
from support.memory_cases import COLOCATED, GRPO, facts

from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.runtime.supervisor.memory._prediction import (
    PeakPrediction,
    Traces,
    predict_beside,
    predict_traced,
)
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase

NONE = Figures(unallocated_bytes=0)
GPU = Figures(capacity_bytes=1000, unallocated_bytes=70)
HALF = MemoryPlan(micro_batch_divisor=2)
BOTH = Traces(peaks={MemoryPlan(): {"backward": 8.0}, HALF: {"backward": 5.0}})


def test_traces_are_used_if_they_have_both_plans_and_else_a_change_is_taken_to_help() -> None:
    found = predict_traced(GRPO, MemoryPhase.backward, MemoryPlan(), HALF, NONE, BOTH)
    assert found == PeakPrediction(before_bytes=8, after_bytes=5, saved_bytes=3)
    one = Traces(peaks={MemoryPlan(): {"backward": 8.0}}, missing="it took more than 20 s")
    found = predict_traced(GRPO, MemoryPhase.backward, MemoryPlan(), HALF, NONE, one)
    assert found == PeakPrediction(missing="it took more than 20 s")
    assert found.lowers


@pytest.mark.parametrize(("after", "lowers"), [(9.0, False), (8.0, False), (7.0, True)])
def test_a_trace_is_believed(after: float, lowers: bool) -> None:
    traces = Traces(peaks={MemoryPlan(): {"backward": 8.0}, HALF: {"backward": after}})
    found = predict_traced(GRPO, MemoryPhase.backward, MemoryPlan(), HALF, NONE, traces)
    assert found.lowers is lowers


def test_what_vllm_holds_and_what_is_fragmented_is_added_to_a_trace() -> None:
    found = predict_traced(facts(**COLOCATED), MemoryPhase.backward, MemoryPlan(), HALF, GPU, BOTH)
    assert (found.before_bytes, found.after_bytes) == (378, 375)


@pytest.mark.parametrize(
    ("phase", "change", "saved"),
    [
        (MemoryPhase.backward, {"vllm_gpu_memory_utilization": 0.2}, 100),
        (MemoryPhase.backward, {"vllm_sleep": True}, 300),
        (MemoryPhase.generate, {"vllm_sleep": True}, 0),
        (MemoryPhase.backward, {"expandable_segments": True}, 70),
    ],
)
def test_what_vllm_reserves_counts_unless_it_sleeps_and_what_is_fragmented_unless_segments_grow(
    phase: MemoryPhase, change: dict[str, Any], saved: int
) -> None:
    found = predict_beside(facts(**COLOCATED), phase, MemoryPlan(), MemoryPlan(**change), GPU)
    assert found == PeakPrediction(saved_bytes=saved)
    assert found.lowers is (saved > 0)


def test_a_smaller_share_saves_nothing_while_vllm_sleeps() -> None:
    asleep, smaller = facts(**COLOCATED, vllm_sleep=True), MemoryPlan(vllm_gpu_memory_utilization=0.2)
    assert not predict_beside(asleep, MemoryPhase.backward, MemoryPlan(), smaller, GPU).lowers
