"""The ladder: which change of the memory plan comes next after a rank has run out of memory in a phase.

    phase → the rungs in order → the first that applies and is predicted to lower the peak of that phase

One change an attempt. The ladder ends because each rung can be climbed only so often. Predictions come from traces of the job,
which the caller makes, and from the closed form where there is none. Pure but for those; called by `policy.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from grpo_run.runtime.continuity.memory.split_exactness import split_differences
from grpo_run.runtime.continuity.memory_facts import MemoryFacts
from grpo_run.runtime.continuity.memory_plan import MemoryPlan
from grpo_run.runtime.supervision.memory.prediction import Device, Prediction, Traces, predict
from grpo_run.runtime.supervision.memory.rungs import Rung, Surroundings, climb
from grpo_run.watchdog.out_of_memory.phases import OUTSIDE, MemoryPhase

_ELSEWHERE = (Rung.vllm_sleep, Rung.vllm_share, Rung.expandable_segments)
"""What leaves more memory free, whatever needs it."""
_MICRO_BATCH = (Rung.micro_batch, Rung.gradient_checkpointing, *_ELSEWHERE)
ORDER: Mapping[MemoryPhase, tuple[Rung, ...]] = {
    MemoryPhase.generate: (
        Rung.generation_sub_batches,
        Rung.vllm_share,
        Rung.vllm_sleep,
        Rung.expandable_segments,
    ),
    MemoryPhase.score: _MICRO_BATCH,
    MemoryPhase.forward: _MICRO_BATCH,
    MemoryPhase.backward: _MICRO_BATCH,
    MemoryPhase.optimizer: (Rung.optimizer_offload, *_ELSEWHERE),
    MemoryPhase.evaluate: _ELSEWHERE,
    MemoryPhase.save: _ELSEWHERE,
    MemoryPhase.load: (Rung.vllm_share, Rung.expandable_segments),
    **dict.fromkeys(OUTSIDE, _ELSEWHERE),
}
"""The rungs that keep the update, by the phase that died."""
DEGRADING = (Rung.shorter_completions,)
"""Rungs that change the experiment; climbed with `--allow-degrade` only, after all others."""

TRACED_PHASES = frozenset({MemoryPhase.score, MemoryPhase.forward, MemoryPhase.backward})
TRACED_RUNGS = frozenset({Rung.micro_batch, Rung.gradient_checkpointing, Rung.shorter_completions})
"""Rungs whose effect a trace of these phases shows. That of the others is arithmetic."""

Tracer = Callable[[MemoryFacts, MemoryPhase, Sequence[MemoryPlan]], Traces]
"""Traces plans, the first of which is the one in effect, until one needs less in a phase; may take seconds."""


def no_traces(facts: MemoryFacts, phase: MemoryPhase, plans: Sequence[MemoryPlan]) -> Traces:
    """Trace nothing."""
    return Traces()


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A rung that was not climbed, and why, as a clause."""

    rung: Rung
    why: str

    @property
    def text(self) -> str:
        """The rung and the reason, for sentences."""
        return f"{str(self.rung).replace('_', ' ')}: {self.why}"


@dataclass(frozen=True, kw_only=True)
class PlanChange:
    """What the next attempt does otherwise.

    Attributes:
        rung: the one change.
        plan: with the change.
        prediction: the peak of the phase that died, before and after.
        skipped: earlier rungs, and why they were not climbed.
        inexact: why the update is not the same; empty if it is, up to the rounding of sums.
    """

    rung: Rung
    plan: MemoryPlan
    prediction: Prediction
    skipped: tuple[Skipped, ...]
    inexact: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Exhausted:
    """No rung is left, or none is to be climbed: why, why each was not climbed, and what the user could change."""

    skipped: tuple[Skipped, ...]
    proposals: tuple[str, ...]
    why: str = "no change of the memory plan is left that keeps the update"


def next_change(
    phase: MemoryPhase,
    facts: MemoryFacts,
    plan: MemoryPlan,
    *,
    around: Surroundings,
    device: Device,
    fragmented: bool = False,
    cache_too_small: bool = False,
    allow_degrade: bool = False,
    trace: Tracer = no_traces,
) -> PlanChange | Exhausted:
    """Return the next change of a plan, or why there is none.

    Args:
        phase: in which a rank ran out of memory.
        facts: of the `train()` call.
        plan: in effect.
        around: what the facts do not say.
        device: what the error says of the GPU.
        fragmented: the allocator had reserved enough, so expandable segments come first.
        cache_too_small: vLLM needs a larger share, not less memory in the phase.
        allow_degrade: the experiment may be changed.
        trace: called once at most, and only if the choice depends on it.

    A change that the closed form alone takes for harmful is made if nothing else is left: it is not exact, and the run would end.
    """
    rungs = ORDER[phase]
    if fragmented:
        rungs = (Rung.expandable_segments, *(rung for rung in rungs if rung is not Rung.expandable_segments))
    if cache_too_small:
        rungs = (Rung.larger_vllm_share,)
    exact = list(_climbed(rungs, facts, plan, around))
    degrading = list(_climbed(DEGRADING, facts, plan, around)) if allow_degrade else []
    wanted = [] if cache_too_small else _to_trace(phase, [*exact, *degrading])
    traces = trace(facts, phase, (plan, *wanted)) if wanted else Traces()
    skipped: dict[Skipped, None] = {}
    doubtful: PlanChange | None = None
    for climbed_rungs in (exact, degrading):
        for rung, climbed in climbed_rungs:
            if rung is Rung.expandable_segments and not device.segments_may_suffice:
                climbed = "less is reserved and not allocated than was missing"
            if isinstance(climbed, str):
                skipped[Skipped(rung=rung, why=climbed)] = None
                continue
            asked = traces if climbed in wanted else Traces()
            prediction = predict(facts, phase, plan, climbed, device, asked)
            found = PlanChange(
                rung=rung,
                plan=climbed,
                prediction=prediction,
                skipped=tuple(skipped),
                inexact=inexact(facts, plan, climbed),
            )
            if prediction.lowers or cache_too_small:
                return found
            if doubtful is None and not prediction.traced and not prediction.equal:
                doubtful = found
            skipped[Skipped(rung=rung, why="it would not lower the peak of this phase")] = None
        if doubtful is not None:
            return doubtful
    return Exhausted(skipped=tuple(skipped), proposals=proposals(phase, facts, plan, around))


def _climbed(
    rungs: Sequence[Rung], facts: MemoryFacts, plan: MemoryPlan, around: Surroundings
) -> Iterator[tuple[Rung, MemoryPlan | str]]:
    """Yield the plans of rungs in their order, or why a rung does not apply.

    A micro-batch is halved again and again: where gradients were not accumulated before, halves need those of the first half too,
    so that a quarter may lower a peak that a half does not.
    """
    for rung in rungs:
        climbed = climb(rung, facts, plan, around)
        if climbed is not None:
            yield rung, climbed
        while rung is Rung.micro_batch and isinstance(climbed, MemoryPlan):
            climbed = climb(rung, facts, climbed, around)
            if isinstance(climbed, MemoryPlan):
                yield rung, climbed


def _to_trace(phase: MemoryPhase, climbed: Sequence[tuple[Rung, MemoryPlan | str]]) -> list[MemoryPlan]:
    """Return the plans that traces can compare, up to the first that is chosen without one."""
    wanted: list[MemoryPlan] = []
    for rung, plan in climbed if phase in TRACED_PHASES else ():
        if isinstance(plan, MemoryPlan):
            if rung not in TRACED_RUNGS:
                break
            wanted.append(plan)
    return wanted


def inexact(facts: MemoryFacts, before: MemoryPlan, after: MemoryPlan) -> tuple[str, ...]:
    """Return why the update is not the same after a change of plan; empty if it is, up to the rounding of sums."""
    reasons: list[str] = []
    if after.micro_batch_divisor != before.micro_batch_divisor:
        reasons += split_differences(facts)
    if after.generation_sub_batches != before.generation_sub_batches and not facts.greedy:
        reasons.append("sampling in smaller batches gives different completions")
    if after.vllm_gpu_memory_utilization != before.vllm_gpu_memory_utilization and not facts.greedy:
        reasons.append(
            "vLLM with another share of memory forms different batches and samples different completions"
        )
    if after.max_completion_length != before.max_completion_length:
        reasons.append("completions are shorter than the script asks for")
    return tuple(reasons)


def proposals(
    phase: MemoryPhase, facts: MemoryFacts, plan: MemoryPlan, around: Surroundings
) -> tuple[str, ...]:
    """Return what would lower the peak of a phase and changes the experiment, as phrases with the present values."""
    if phase not in TRACED_PHASES | {MemoryPhase.generate}:
        return ()
    if facts.trainer == "sft":
        return (f"shorter samples (max_length, now {facts.max_length})",) if facts.max_length else ()
    shorter = climb(Rung.shorter_completions, facts, plan, around)
    if not isinstance(shorter, MemoryPlan):
        return ()
    tokens = plan.max_completion_length or facts.max_completion_length
    values = f"max_completion_length={shorter.max_completion_length}, now {tokens}"
    return (f"shorter completions ({values}; `--allow-degrade` halves it)",)
