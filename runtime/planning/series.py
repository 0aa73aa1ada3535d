"""What one rank holds in the course of an optimizer step, instant by instant. Called by `cli.planning`, which
draws it.

The order of allocations is known, their times are not: instants are spread evenly over a phase.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_run.runtime.planning._trace import open_trace
from grpo_run.runtime.planning.prediction import PredictedPhase, Prediction, Predictor
from grpo_run.runtime.planning.terms import counted
from grpo_run.runtime.planning.timeline import PHASES, AllocationTimeline, Part, Weigh, peaks_of

INSTANTS = 120
"""Instants of a phase; of all that fall into one, the highest is kept."""
GENERATE = "generate"
OTHERS = "outside torch"
OUTSIDE = ("CUDA context", "cuBLAS workspaces", "NCCL", "vLLM's share", "vLLM beyond its share")
"""Terms that torch's allocator does not hold."""
ADDED = "buffers"


@dataclass(frozen=True, kw_only=True)
class StepPhase:
    """A phase of the step.

    Attributes:
        name: of the phase.
        instants: bytes by kind, in order.
        spread_bytes: what the highest figure of the device's memory is above the lowest: fragmentation, and
            terms that are ranges.
    """

    name: str
    instants: Sequence[dict[str, float]]
    spread_bytes: float


def over_a_step(predictor: Predictor, prediction: Prediction) -> list[StepPhase]:
    """Return the phases of a later step in order, the generation first if there is one. Traces all layers of
    the model.

    Args:
        predictor: of the model.
        prediction: of the job that is drawn.
    """
    job = prediction.job.as_run
    with open_trace(job, predictor.config, predictor.shape.layers) as trace:
        trace.step(job.batch, job.completion)
        number = trace.step(job.batch, job.completion)
        timeline = trace.timeline
    found = _traced(timeline, number, counted(job))
    if GENERATE in prediction.phases and GENERATE not in found:  # by vLLM, which is not traced
        found[GENERATE] = [dict(prediction.phases[GENERATE].traced)] * INSTANTS
    return [_with_terms(phase, found[phase], prediction.phases[phase]) for phase in PHASES if phase in found]


def _traced(timeline: AllocationTimeline, step: int, weigh: Weigh) -> dict[str, list[Mapping[str, float]]]:
    """Return the instants of each traced phase of a step."""
    bounds: dict[str, tuple[int, int]] = {}
    for mark, end in zip(
        timeline.marks, [*(one.event for one in timeline.marks[1:]), len(timeline.events)], strict=True
    ):
        if mark.step == step and mark.phase in PHASES:
            bounds[mark.phase] = (bounds.get(mark.phase, (mark.event, 0))[0], end)
    parts: list[Part] = []
    at = 0
    for phase, (start, end) in bounds.items():
        edges = [start + (end - start) * number // INSTANTS for number in range(INSTANTS + 1)]
        parts += [
            (None, at, start),
            *(((phase, number), *edge) for number, edge in enumerate(pairwise(edges))),
        ]
        at = end
    found = peaks_of(timeline, parts, weigh)
    return {phase: [found[phase, number].bytes_by_kind for number in range(INSTANTS)] for phase in bounds}


def _with_terms(phase: str, instants: Sequence[Mapping[str, float]], memory: PredictedPhase) -> StepPhase:
    added: dict[str, float] = {}
    for name, (low, _) in memory.extra.items():
        kind = _kind(name)
        added[kind] = added.get(kind, 0.0) + low
    return StepPhase(
        name=phase,
        instants=[{**held, **added} for held in instants],
        spread_bytes=memory.high_bytes - memory.low_bytes,
    )


def _kind(term: str) -> str:
    return OTHERS if term in OUTSIDE else ADDED
