"""Predict the memory of a job: trace it, extrapolate to all layers, and add what a trace does not show.

The peak of each phase over the size of a micro-batch is fitted through traced points; the fit also says how
far another trace is from it. Called by `cli/plan.py` and `changes.py`. Prints nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_run.runtime.planning._allocator import unused_bytes
from grpo_run.runtime.planning._terms import Term, counted, terms
from grpo_run.runtime.planning._trace import open_trace
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.model_config import (
    Shape,
    count_parameters,
    layers_are_alike,
    shape_of,
    with_layers,
)
from grpo_run.runtime.planning.timeline import Peak, extrapolate, highest, peaks


@dataclass(frozen=True, kw_only=True)
class Point:
    """A traced peak.

    Attributes:
        rows: of the micro-batch.
        length: tokens of a row.
        peak_bytes: what was traced.
    """

    rows: int
    length: int
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """`peak = fixed + token * rows * length + pair * rows * length**2`, in bytes.

    The last term is the attention mask, and the attention matrix where it is stored.

    Attributes:
        residual: the largest distance of a checked point from the fit, over the point's peak.
    """

    fixed_bytes: float
    token_bytes: float
    pair_bytes: float
    residual: float = 0.0

    def at(self, rows: int, length: int) -> float:
        """Return the peak of a size, in bytes."""
        return self.fixed_bytes + rows * length * (self.token_bytes + self.pair_bytes * length)


def fit(base: Point, longer: Point, wider: Point, checked: Sequence[Point]) -> Fit:
    """Return the fit through three points.

    Args:
        base: of the job.
        longer: as many rows, longer ones.
        wider: more rows of the same length.
        checked: other points, for the residual only.
    """
    assert base.rows == longer.rows
    assert base.length < longer.length
    assert base.length == wider.length
    row = (wider.peak_bytes - base.peak_bytes) / (wider.rows - base.rows)
    fixed = base.peak_bytes - row * base.rows
    long_row = (longer.peak_bytes - fixed) / longer.rows
    pair = (long_row / longer.length - row / base.length) / (longer.length - base.length)
    # no token needs less in longer rows, and none needs less than nothing
    pair = max(0.0, min(pair, row / base.length**2))
    found = Fit(fixed_bytes=fixed, token_bytes=row / base.length - pair * base.length, pair_bytes=pair)
    distances = [
        abs(found.at(one.rows, one.length) / one.peak_bytes - 1) for one in checked if one.peak_bytes
    ]
    return replace(found, residual=max(distances, default=0.0))


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
            the lowest figures of all terms, and with the fragmentation of the replay and the highest.
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
        first_step: traced peaks of the first step, before the optimizer has state, in bytes.
        terms: what was added.
        fits: per traced phase and window, over the size of a micro-batch; empty unless asked for. The peak of
            a phase is the highest of its windows, so it is linear in pieces.
        fragmentation_bytes: reserved, but not allocated, in the replay of torch's default allocator.
        trained_parameters: parameters of the model that are trained; with LoRA those of its adapters.
    """

    job: Job
    phases: Mapping[str, PredictedPhase]
    first_step: Mapping[str, float]
    terms: Sequence[Term]
    fits: Mapping[tuple[str, int], Fit]
    fragmentation_bytes: int
    trained_parameters: int

    @property
    def binding(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: self.phases[phase].high_bytes)

    def fit_of(self, phase: str) -> Fit | None:
        """The fit of the window in which a phase is highest; None if nothing was fitted."""
        fits = [found for (name, _), found in self.fits.items() if name == phase]
        return max(fits, key=lambda found: found.at(self.job.batch, self.job.length), default=None)

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


class Predictor:
    """Predictions for one model.

    Args:
        config: transformers' configuration of the model.
        gpu_bytes: memory of the GPU, if it is known.
        all_layers: trace every layer instead of extrapolating.

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

    def predict(self, job: Job, *, fitted: bool = False) -> Prediction:
        """Predict one job.

        Args:
            job: sizes and settings.
            fitted: trace three more sizes of the micro-batch and fit the peak over them.
        """
        sizes = _sizes(job) if fitted else [(job.batch, job.completion)]
        run = job.as_run
        traced, unused, trained = self._trace(run, sizes)
        first, windows = traced[0], traced[1:]
        steady = highest(windows[0])
        added = terms(run, self.shape, self.gpu_bytes, trained)
        if job.device == "cpu":
            unused = 0
        return Prediction(
            job=job,
            phases={
                phase: _with_terms(phase, peak, added, unused)
                for phase, peak in {**_generation(job, steady), **steady}.items()
            },
            first_step={phase: peak.total for phase, peak in highest(first).items()},
            terms=added,
            fits=_fits(job, sizes, windows) if fitted else {},
            fragmentation_bytes=unused,
            trained_parameters=trained,
        )

    def _grows_linearly(self) -> bool:
        """Whether layers have equally many parameters, so that a deeper model is an extrapolation."""
        if not layers_are_alike(self.config):
            return False
        few, more = (count_parameters(with_layers(self.config, depth)) for depth in (FEW_LAYERS, MORE_LAYERS))
        layer, rest = divmod(more - few, MORE_LAYERS - FEW_LAYERS)
        return rest == 0 and few + layer * (self.shape.layers - FEW_LAYERS) == self.shape.parameters

    def _trace(
        self, job: Job, sizes: Sequence[tuple[int, int]]
    ) -> tuple[list[dict[tuple[str, int], Peak]], int, int]:
        """Return the peaks of the first step and of a later step for each size, what the allocator cannot
        use, and how many parameters are trained.
        """
        weigh = counted(job)
        found: list[list[dict[tuple[str, int], Peak]]] = []
        unused, trained = 0, []
        for depth in self.depths:
            with open_trace(job, self.config, depth) as trace:
                # the first size twice, since the optimizer has no state before its first step
                numbers = [trace.step(*size) for size in (sizes[0], *sizes)]
                found.append([peaks(trace.tracker.timeline, number, weigh) for number in numbers])
                unused = unused_bytes(trace.tracker.timeline)
                trained.append(trace.trained_parameters)
        if len(found) == 1:
            return found[0], unused, trained[0]
        few, more = self.depths
        return (
            [
                extrapolate(first, second, (few, more, self.shape.layers))
                for first, second in zip(*found, strict=True)
            ],
            unused,
            trained[1] + (trained[1] - trained[0]) * (self.shape.layers - more) // (more - few),
        )


def _generation(job: Job, steady: Mapping[str, Peak]) -> dict[str, Peak]:
    """Return what is alive while vLLM generates: what every step begins with."""
    if not job.generates or job.transformers_generates:
        return {}
    start = steady["score" if job.scored else "forward"]
    held = {kind: start.bytes_by_kind.get(kind, 0.0) for kind in ("weights", "optimizer")}
    return {"generate": Peak(bytes_by_kind=held)}


def _with_terms(phase: str, traced: Peak, added: Sequence[Term], unused: int) -> PredictedPhase:
    extra = [term for term in added if phase in term.phases]
    inside = [term for term in extra if term.in_allocator]
    allocated = traced.total + sum(term.low_bytes for term in inside)
    high = traced.total + sum(term.high_bytes for term in inside)
    outside = [term for term in extra if not term.in_allocator]
    return PredictedPhase(
        traced=traced.bytes_by_kind,
        allocated_bytes=allocated,
        low_bytes=allocated + sum(term.low_bytes for term in outside),
        high_bytes=high + unused + sum(term.high_bytes for term in outside),
    )


def _sizes(job: Job) -> list[tuple[int, int]]:
    """Return rows and completion of the traces for a fit: the job, longer, wider, and one that only checks
    it.

    The others are larger than the job: sizes are sought that fill a GPU, and a small micro-batch may peak
        elsewhere.
    """
    return [
        (job.batch, job.completion),
        (job.batch, 2 * job.completion),
        (2 * job.batch, job.completion),
        (max(1, job.batch // 2), 3 * job.completion),
    ]


def _fits(
    job: Job, sizes: Sequence[tuple[int, int]], windows: Sequence[Mapping[tuple[str, int], Peak]]
) -> dict[tuple[str, int], Fit]:
    found = {}
    for window in windows[0]:
        base, longer, wider, *checked = [
            Point(rows=rows, length=job.prompt + completion, peak_bytes=step[window].total)
            for (rows, completion), step in zip(sizes, windows, strict=True)
        ]
        found[window] = fit(base, longer, wider, checked)
    return found
