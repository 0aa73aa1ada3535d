"""What one rank holds in the course of an optimizer step, instant by instant. Called by `cli.planning`, which
draws it.

The order of allocations is known, their times are not: instants are spread evenly over a phase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from grpo_run.runtime.planning._terms import counted
from grpo_run.runtime.planning._trace import open_trace
from grpo_run.runtime.planning.prediction import Prediction, Predictor
from grpo_run.runtime.planning.timeline import PHASES, AllocationTimeline, Part, Weigh, peaks_of

INSTANTS = 120
"""Instants of a phase; of all that fall into one, the highest is kept."""
GENERATE = "generate"
INSIDE, OUTSIDE = "buffers", "outside torch"
"""Kinds of the terms that torch's allocator holds, and of those that it does not."""


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
    """Return the phases of a later step in order, generation first if there is one.

    Traces all layers of the model.

    Args:
        predictor: of the model.
        prediction: of the job that is drawn.
    """
    job = prediction.job.as_run
    with open_trace(job, predictor.config, predictor.shape.layers) as trace:
        trace.step(job.batch, job.completion)
        number = trace.step(job.batch, job.completion)
        timeline = trace.tracker.timeline
    found = _traced(timeline, number, counted(job))
    if GENERATE in prediction.phases and GENERATE not in found:  # by vLLM, which is not traced
        found[GENERATE] = [prediction.phases[GENERATE].traced] * INSTANTS
    phases = []
    for name in PHASES:
        if name in found:
            added, memory = _terms(prediction, name), prediction.phases[name]
            instants = [{**held, **added} for held in found[name]]
            spread = memory.high_bytes - memory.low_bytes
            phases.append(StepPhase(name=name, instants=instants, spread_bytes=spread))
    return phases


def _traced(timeline: AllocationTimeline, step: int, weigh: Weigh) -> dict[str, list[Mapping[str, float]]]:
    """Return the instants of each traced phase of a step."""
    bounds: dict[str, tuple[int, int]] = {}
    ends = [*(one.event for one in timeline.marks[1:]), len(timeline.events)]
    for mark, end in zip(timeline.marks, ends, strict=True):
        if mark.step == step and mark.phase in PHASES:
            bounds[mark.phase] = (bounds.get(mark.phase, (mark.event, 0))[0], end)
    parts: list[Part] = []
    at = 0
    for phase, (start, end) in bounds.items():
        edges = [start + (end - start) * number // INSTANTS for number in range(INSTANTS + 1)]
        parts.append((None, at, start))
        parts += [((phase, number), *edge) for number, edge in enumerate(pairwise(edges))]
        at = end
    found = peaks_of(timeline, parts, weigh)
    return {phase: [found[phase, number].bytes_by_kind for number in range(INSTANTS)] for phase in bounds}


def _terms(prediction: Prediction, phase: str) -> dict[str, float]:
    """Return what is added to the trace of a phase, by kind."""
    added: dict[str, float] = defaultdict(float)
    for term in prediction.terms:
        if phase in term.phases:
            added[INSIDE if term.in_allocator else OUTSIDE] += term.low_bytes
    return added
