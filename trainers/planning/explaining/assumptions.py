"""Single assumptions about a job, what each of them would need, and their order by fit to what was observed.

Called by `cli.planning`. Says what an observation is consistent with; it proves nothing about the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_run.trainers.planning.explaining import own_code
from grpo_run.trainers.planning.job import Job
from grpo_run.trainers.planning.prediction import Prediction, Predictor

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """One assumption.

    Attributes:
        name: a short word for it, for programs.
        assumption: what would have to be true.
        arithmetic: how its figure comes about.
        allocated_bytes: peak of torch's allocator that follows from it.
        changes: fields of the job that it changes; empty for what comes on top of the job.
        combines: it can be taken together with another one.
    """

    name: str
    assumption: str
    arithmetic: str
    allocated_bytes: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    combines: bool = False

    def distance(self, observed_bytes: float) -> float:
        """How far it is from an observation: the logarithm of their ratio, without its sign."""
        return abs(math.log(self.allocated_bytes / observed_bytes))


def ranked(explanations: Sequence[Explanation], observed_bytes: float) -> list[Explanation]:
    """Return explanations, the best fit first."""
    return sorted(explanations, key=lambda one: one.distance(observed_bytes))


def floor(prediction: Prediction) -> tuple[float, str]:
    """Return what no implementation of the job can do without, in bytes, and how it comes about."""
    held = prediction.phases["optimizer"].traced
    kinds = ("weights", "gradients", "optimizer")
    total = sum(held.get(kind, 0.0) for kind in kinds)
    return total, " + ".join(f"{kind} {_gib(held.get(kind, 0.0))}" for kind in kinds)


def explanations(
    predictor: Predictor, prediction: Prediction, *, padded_to: int | None = None
) -> list[Explanation]:
    """Return what each assumption would need.

    Args:
        predictor: of the model.
        prediction: of the job as it is described.
        padded_to: tokens to which rows could be padded; the model's longest context if not given.
    """
    found = [
        Explanation(
            name="as-described",
            assumption="the job is as described",
            arithmetic=f"peak in {prediction.binding}",
            allocated_bytes=prediction.allocated_bytes,
        )
    ]
    for name, assumption, changes in _other_jobs(prediction.job, padded_to or predictor.shape.positions):
        other = explained_by_trace(predictor.predict(replace(prediction.job, **changes)), name, assumption)
        found.append(replace(other, changes=changes, combines=True))
    return [*found, *_additions(predictor, prediction)]


def explained_by_trace(prediction: Prediction, name: str, assumption: str) -> Explanation:
    """Return an explanation from the prediction of the job that an assumption makes of it."""
    highest = max(prediction.phases, key=lambda phase: prediction.phases[phase].allocated_bytes)
    held = prediction.phases[highest].traced
    return Explanation(
        name=name,
        assumption=assumption,
        arithmetic=f"peak in {highest}: "
        + " + ".join(f"{kind} {_gib(size)}" for kind, size in held.items() if size > _GIB / 200),
        allocated_bytes=prediction.allocated_bytes,
    )


def _other_jobs(job: Job, padded_to: int | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    if padded_to is not None and padded_to > job.prompt + job.completion:
        real = job.prompt + job.completion
        padded = {"completion": padded_to - job.prompt}
        yield "padding", f"rows are padded to {padded_to} tokens, not {real}", padded
    if job.weights != "float32":
        yield "float32", "weights, gradients and optimizer are float32", {"weights": "float32"}
    if job.autocast:
        yield "no-autocast", "the forward pass runs in the weights' type", {"autocast": False}
    if job.checkpointing:
        yield "no-checkpointing", "gradient checkpointing is off", {"checkpointing": False}
    if job.attention != "eager":
        yield "eager-attention", "attention matrices are stored (eager)", {"attention": "eager"}
    if not job.reference:
        yield "reference", "a reference model is kept", {"reference": True}
    if job.accumulation > 1:
        whole = {"batch": job.batch * job.accumulation, "accumulation": 1}
        yield "no-accumulation", f"all {whole['batch']} rows are one micro-batch", whole


def _additions(predictor: Predictor, prediction: Prediction) -> Iterator[Explanation]:
    """Yield what comes on top of the job, or replaces TRL's loss."""
    job, base = prediction.job, prediction.allocated_bytes
    traced = prediction.phases["optimizer"].traced

    def added(name: str, assumption: str, what: str, size: float) -> Explanation:
        return Explanation(
            name=name,
            assumption=assumption,
            arithmetic=f"as described {_gib(base)} + {what} {_gib(size)}",
            allocated_bytes=base + size,
            combines=True,
        )

    yield added("second-optimizer", "a second optimizer has state", "its state", traced.get("optimizer", 0.0))
    yield added("second-weights", "the weights are loaded twice", "weights", traced.get("weights", 0.0))
    cached = own_code.kept_with_cache(predictor, job)
    tokens = f"graph of {job.completion} generated tokens"
    yield added("kept-graph", "generation keeps its graph (no_grad is missing)", tokens, cached)
    uncached = own_code.kept_without_cache(predictor, job)
    yield added("kept-graph-no-cache", "generation keeps its graph and uses no cache", tokens, uncached)
    logits = own_code.materialized_logits(predictor, job)
    row = 4 * job.batch * (job.prompt + job.completion) * predictor.shape.vocabulary
    yield Explanation(
        name="logits",
        assumption="the loss materializes the logits of all tokens",
        arithmetic=f"one copy in fp32: 4 B x {job.batch} x {job.prompt + job.completion} x {predictor.shape.vocabulary}"
        f" = {_gib(row)}; several are alive at once",
        allocated_bytes=logits,
    )


def _gib(size: float) -> str:
    return f"{size / _GIB:.2f} GiB"
