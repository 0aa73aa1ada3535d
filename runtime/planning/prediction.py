"""Predict the memory of a job: trace it, extrapolate to all layers, and add what a trace does not show.

Called by `cli/plan.py` and `changes.py`. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.planning._terms import Term, terms
from grpo_run.runtime.planning._trace import open_trace
from grpo_run.runtime.planning.job import PHASES, Job
from grpo_run.runtime.planning.model_config import (
    Shape,
    count_parameters,
    layers_are_alike,
    shape_of,
    with_layers,
)

FRAGMENTED_FRACTION = 0.1
"""Of what is allocated: what torch's CUDA allocator may reserve in addition, because a free block is too
small. Replays of 20 jobs in its rules gave 2 to 10 %.
"""
FEW_LAYERS, MORE_LAYERS = 2, 4
"""Layers of the two traces from which a deeper model is extrapolated."""
ALL_LAYERS_UP_TO = 6
"""Models with at most this many layers are traced as a whole: two traces would cost as much."""


@dataclass(frozen=True, kw_only=True)
class PredictedPhase:
    """Memory of one rank in one phase, in bytes.

    Attributes:
        traced: what torch's allocator holds at the peak, by kind.
        allocated_bytes: peak of torch's allocator (`max_memory_allocated`).
        low_bytes, high_bytes: range of the whole device memory of the process: without fragmentation and with
            the lowest figures of all terms, and with fragmentation and the highest.
    """

    traced: Mapping[str, float]
    allocated_bytes: float
    low_bytes: float
    high_bytes: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a job needs on one rank.

    Attributes:
        job: what was predicted.
        phases: by name, in the order of a step.
        terms: what was added.
        trained_parameters: parameters of the model that are trained; with LoRA those of its adapters.
    """

    job: Job
    phases: Mapping[str, PredictedPhase]
    terms: Sequence[Term]
    trained_parameters: int

    @property
    def binding(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: self.phases[phase].high_bytes)

    @property
    def low_bytes(self) -> float:
        """Lowest estimate of the device memory that the process needs."""
        return max(phase.low_bytes for phase in self.phases.values())

    @property
    def high_bytes(self) -> float:
        """Highest estimate."""
        return self.phases[self.binding].high_bytes

    @property
    def allocated_bytes(self) -> float:
        """Highest peak of torch's allocator."""
        return max(phase.allocated_bytes for phase in self.phases.values())

    @property
    def fragmentation_bytes(self) -> float:
        """What of the highest estimate is reserved, but not allocated."""
        return _fragmented(self.job, self.phases[self.binding].allocated_bytes)


class Predictor:
    """Predictions for one model.

    Args:
        config: transformers' configuration of the model.
        gpu_bytes: memory of the GPU, if it is known.
        all_layers: trace every layer instead of extrapolating; for tests.

    Attributes:
        depths: layers of the traces: all of them, or two numbers from which all are extrapolated.
    """

    def __init__(self, config: Any, *, gpu_bytes: int | None = None, all_layers: bool = False) -> None:
        self.config = config
        self.shape: Shape = shape_of(config)
        self.gpu_bytes = gpu_bytes
        self.depths: tuple[int, ...] = (
            (self.shape.layers,)
            if all_layers or self.shape.layers <= ALL_LAYERS_UP_TO or not self._grows_linearly()
            else (FEW_LAYERS, MORE_LAYERS)
        )

    def predict(self, job: Job) -> Prediction:
        """Predict one job."""
        run = job.as_run
        windows, trained = self._trace(run)
        steady: dict[str, Mapping[str, float]] = {}
        for (phase, _), held in windows.items():
            if phase not in steady or sum(held.values()) > sum(steady[phase].values()):
                steady[phase] = held
        if job.generates and not job.transformers_generates:  # what every step begins with is there
            start = steady["score" if job.scored else "forward"]
            steady["generate"] = {kind: start[kind] for kind in ("weights", "optimizer")}
        added = terms(run, self.shape, self.gpu_bytes, trained)
        return Prediction(
            job=job,
            phases={
                phase: _with_terms(job, phase, steady[phase], added) for phase in PHASES if phase in steady
            },
            terms=added,
            trained_parameters=trained,
        )

    def _grows_linearly(self) -> bool:
        """Whether layers have equally many parameters, so that a deeper model is an extrapolation."""
        if not layers_are_alike(self.config):
            return False
        few, more = (count_parameters(with_layers(self.config, depth)) for depth in (FEW_LAYERS, MORE_LAYERS))
        layer, rest = divmod(more - few, MORE_LAYERS - FEW_LAYERS)
        return rest == 0 and few + layer * (self.shape.layers - FEW_LAYERS) == self.shape.parameters

    def _trace(self, job: Job) -> tuple[dict[tuple[str, int], dict[str, float]], int]:
        """Return what a step holds at the peak of each window, by kind, and how many parameters are
        trained.
        """
        found: list[dict[tuple[str, int], dict[str, float]]] = []
        trained: list[int] = []
        for depth in self.depths:
            with open_trace(job, self.config, depth) as trace:
                trace.step()
                trace.step()  # before the first one, the optimizer has no state
                found.append(dict(trace.tracker.peaks))
                trained.append(trace.trained_parameters)
        # with one depth, the share is of a difference of nothing
        share = (self.shape.layers - self.depths[-1]) / max(1, self.depths[-1] - self.depths[0])
        few, more = found[0], found[-1]
        windows = {
            place: {kind: size + share * (size - few[place][kind]) for kind, size in held.items()}
            for place, held in more.items()
        }
        return windows, round(trained[-1] + share * (trained[-1] - trained[0]))


def _fragmented(job: Job, allocated: float) -> float:
    return FRAGMENTED_FRACTION * allocated if job.device == "cuda" else 0.0


def _with_terms(job: Job, phase: str, held: Mapping[str, float], added: Sequence[Term]) -> PredictedPhase:
    extra = [term for term in added if phase in term.phases]
    traced, all_low = sum(held.values()), sum(term.low_bytes for term in extra)
    allocated = traced + sum(term.low_bytes for term in extra if term.in_allocator)
    high = traced + sum(term.high_bytes for term in extra)
    return PredictedPhase(
        traced=held,
        allocated_bytes=allocated,
        low_bytes=traced + all_low,
        high_bytes=high + _fragmented(job, allocated),
    )
