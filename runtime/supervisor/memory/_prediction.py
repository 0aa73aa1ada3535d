"""What a change of plan does to the peak of a phase: by traces of the job, or by arithmetic.

A prediction compares two plans of one run; it does not say whether either fits. A change of what the job
computes is seen in its traces only. A change of what is in use beside the job is known: what vLLM reserves on
the same GPU (its share, in generation always, in the other phases unless it sleeps), and what the allocator
has reserved and cannot use, if the error says how much; expandable segments leave none of it. Pure; called
by `fallback_steps.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.plan import MemoryPlan
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase

_PAGE_BYTES = 2 << 20
"""A small segment of torch's allocator."""
VLLM_SHARE = 0.3
"""TRL's default of `vllm_gpu_memory_utilization`."""
GPU_BYTES = 80 << 30
"""Taken where the error does not say the capacity."""


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What traces of the job have found.

    Attributes:
        peaks: by plan and name of the phase, in bytes of torch's allocator.
        missing: why a plan has no trace, as a clause; empty if none was asked for.
    """

    peaks: Mapping[MemoryPlan, Mapping[str, float]] = field(default_factory=dict)
    missing: str = ""

    def of(self, plan: MemoryPlan, phase: MemoryPhase) -> float | None:
        """Return the traced peak of a phase with a plan, in bytes; None if there is none."""
        return self.peaks.get(plan, {}).get(str(phase))


@dataclass(frozen=True, kw_only=True)
class PeakPrediction:
    """By how much a change of plan lowers the peak of one phase.

    Attributes:
        before_bytes, after_bytes: traced peaks with both plans; None without traces.
        saved_bytes: the difference; None if it is not known, only that there is one.
        missing: why there are no traces, as a clause; empty if none would show the difference.
    """

    before_bytes: int | None = None
    after_bytes: int | None = None
    saved_bytes: int | None = None
    missing: str = ""

    @property
    def lowers(self) -> bool:
        """Whether the next plan needs less, as far as is known."""
        return self.saved_bytes is None or self.saved_bytes > 0


def predict_traced(
    facts: MemoryFacts,
    phase: MemoryPhase,
    before: MemoryPlan,
    after: MemoryPlan,
    figures: Figures,
    traces: Traces,
) -> PeakPrediction:
    """Compare two plans with which the job computes otherwise.

    Args:
        figures: what the error says of the GPU.
        traces: of the job. Unless they have both plans, the change is taken to help.
    """
    traced_before, traced_after = traces.of(before, phase), traces.of(after, phase)
    if traced_before is None or traced_after is None:
        return PeakPrediction(missing=traces.missing)
    before_bytes = round(traced_before) + _held(facts, phase, before, figures)
    after_bytes = round(traced_after) + _held(facts, phase, after, figures)
    return PeakPrediction(
        before_bytes=before_bytes, after_bytes=after_bytes, saved_bytes=before_bytes - after_bytes
    )


def predict_beside(
    facts: MemoryFacts, phase: MemoryPhase, before: MemoryPlan, after: MemoryPlan, figures: Figures
) -> PeakPrediction:
    """Compare two plans that differ in what is in use beside the job."""
    freed = _held(facts, phase, before, figures) - _held(facts, phase, after, figures)
    return PeakPrediction(saved_bytes=freed)


def _held(facts: MemoryFacts, phase: MemoryPhase, plan: MemoryPlan, figures: Figures) -> int:
    """What is in use on the device beside the job's tensors, as far as a plan changes it."""
    held = 0
    sleeps = (facts.vllm_sleep or plan.vllm_sleep) and phase is not MemoryPhase.generate
    if facts.generates == "vllm_colocate" and not sleeps:
        held = round(vllm_share(facts, plan) * (figures.capacity_bytes or GPU_BYTES))
    if plan.expandable_segments:
        return held
    # what is not known is a page of the allocator: more than none
    return held + (_PAGE_BYTES if figures.unallocated_bytes is None else figures.unallocated_bytes)


def vllm_share(facts: MemoryFacts, plan: MemoryPlan) -> float:
    """Return vLLM's share of a GPU with a plan."""
    return plan.vllm_gpu_memory_utilization or facts.vllm_gpu_memory_utilization or VLLM_SHARE
