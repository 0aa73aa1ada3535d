"""Single assumptions about a job, what each of them would need, and their order by fit to what was observed.

Called by `cli.planning`. Says what an observation is consistent with; it proves nothing about the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from grpo_run.trainers.planning.explaining import own_code
from grpo_run.trainers.planning.job import Job
from grpo_run.trainers.planning.prediction import Prediction, Predictor
from grpo_run.trainers.planning.timeline import KINDS

Arithmetic = tuple[str | float, ...]
"""Texts, and sizes in bytes between them, which are printed in one unit."""
VISIBLE_SHARE, VISIBLE_BYTES = 0.01, (1 << 20) / 20
"""A part of a peak that is smaller than this share of it, or than this size, is not named in its arithmetic."""
SAME = 0.001
"""Share of the described job's figure by which that of an assumption differs at least; else the two cannot be told apart."""
DESCRIBED = "as-described"


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
    arithmetic: Arithmetic
    allocated_bytes: float
    changes: Mapping[str, Any] = field(default_factory=dict)
    combines: bool = False

    def distance(self, observed_bytes: float) -> float:
        """How far it is from an observation: the logarithm of their ratio, without its sign."""
        return abs(math.log(self.allocated_bytes / observed_bytes))


def ranked(explanations: Sequence[Explanation], observed_bytes: float) -> list[Explanation]:
    """Return explanations, the best fit first."""
    return sorted(explanations, key=lambda one: one.distance(observed_bytes))


def without_effect(explanations: Sequence[Explanation]) -> list[Explanation]:
    """Return the assumptions with which the peak is that of the job as it is described, so that no observation shows them."""
    (described,) = (one.allocated_bytes for one in explanations if one.name == DESCRIBED)
    return [
        one
        for one in explanations
        if one.name != DESCRIBED and abs(one.allocated_bytes / described - 1) < SAME
    ]


def floor(prediction: Prediction, parameters: int) -> tuple[float, Arithmetic]:
    """Return what no implementation of the job can do without, in bytes, and how it comes about.

    Args:
        prediction: of the job as it is described.
        parameters: of its model.
    """
    job, trained = prediction.job, prediction.trained_parameters
    models = ", policy and reference" if job.reference and not job.lora_rank else ""
    held = prediction.phases["optimizer"].traced
    found = [
        ("weights", held.get("weights", 0.0), parameters, f"parameters{models}"),
        ("gradients", held.get("gradients", 0.0), trained, "trained parameters"),
        ("optimizer", _state_bytes(prediction), trained, "trained parameters"),
    ]
    shown = [one for one in found if one[1] >= VISIBLE_BYTES]
    return sum(size for _, size, _, _ in found), _joined(
        (f"{kind} ", size, f" ({size / count:.3g} B x {count / 1e6:,.1f} M {what})")
        for kind, size, count, what in shown
    )


def _state_bytes(prediction: Prediction) -> float:
    """Return the state of the optimizer, without what is alive in an update only."""
    return prediction.phases["forward"].traced.get("optimizer", 0.0)


def _joined(parts: Iterable[Arithmetic]) -> Arithmetic:
    """Return parts with plus signs between them."""
    found: list[str | float] = []
    for part in parts:
        found += (*([" + "] if found else []), *part)
    return tuple(found)


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
        explained_by_trace(prediction, DESCRIBED, "the job is as described"),
    ]
    for name, assumption, changes in other_jobs(prediction.job, padded_to or predictor.shape.positions):
        other = explained_by_trace(predictor.predict(replace(prediction.job, **changes)), name, assumption)
        found.append(replace(other, changes=changes, combines=True))
    return [*found, *_additions(predictor, prediction)]


def explained_by_trace(prediction: Prediction, name: str, assumption: str) -> Explanation:
    """Return an explanation from the prediction of the job that an assumption makes of it."""
    highest = max(prediction.phases, key=lambda phase: prediction.phases[phase].allocated_bytes)
    held = dict(prediction.phases[highest].traced)
    for term in prediction.terms:
        if term.in_allocator and highest in term.phases:
            held[term.name] = term.low_bytes
    least = max(VISIBLE_SHARE * prediction.allocated_bytes, VISIBLE_BYTES)
    order = [*KINDS, *(name for name in held if name not in KINDS)]
    return Explanation(
        name=name,
        assumption=assumption,
        arithmetic=(
            f"peak in {highest}: ",
            *_joined((f"{kind} ", held[kind]) for kind in order if held.get(kind, 0.0) >= least),
        ),
        allocated_bytes=prediction.allocated_bytes,
    )


def other_jobs(job: Job, padded_to: int | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the assumptions with which a job is another one: name, what would have to be true, and changed fields.

    Args:
        job: as it is described.
        padded_to: tokens to which rows could be padded, if any.
    """
    if padded_to is not None and padded_to > job.length:
        padded = {"completion": padded_to - job.prompt}
        yield "padding", f"rows are padded to {padded_to} tokens, not {job.length}", padded
    if job.weights != "float32":
        what = "the frozen weights" if job.lora_rank else "weights, gradients and optimizer"
        yield "float32", f"{what} are float32", {"weights": "float32"}
    if job.autocast:
        yield "no-autocast", "the forward pass runs in the weights' type", {"autocast": False}
    if job.checkpointing:
        yield "no-checkpointing", "gradient checkpointing is off", {"checkpointing": False}
    if job.attention != "eager":
        yield "eager-attention", "attention matrices are stored (eager)", {"attention": "eager"}
    if job.generates and not job.reference:
        what = (
            "log-probabilities of a reference are computed" if job.lora_rank else "a reference model is kept"
        )
        yield "reference", what, {"reference": True}
    if job.accumulation > 1:
        whole = {
            "batch": job.batch * job.accumulation,
            "accumulation": 1,
            "rollout_batches": -(-job.rollout_batches // job.accumulation),
        }
        yield "no-accumulation", f"all {whole['batch']} rows are one micro-batch", whole


def _additions(predictor: Predictor, prediction: Prediction) -> Iterator[Explanation]:
    """Yield what comes on top of the job, or replaces TRL's loss."""
    job, base = prediction.job.as_run, prediction.allocated_bytes

    def added(name: str, assumption: str, what: str, size: float) -> Explanation:
        return Explanation(
            name=name,
            assumption=assumption,
            arithmetic=("as described ", base, f" + {what} ", size),
            allocated_bytes=base + size,
            combines=True,
        )

    yield added("second-optimizer", "a second optimizer has state", "its state", _state_bytes(prediction))
    models = 2 if job.reference and not job.lora_rank else 1
    weights = prediction.phases["optimizer"].traced.get("weights", 0.0) / models
    yield added("second-weights", "the weights are loaded twice", "weights", weights)
    if job.generates and job.vllm_share is None:
        cached = own_code.kept_with_cache(predictor, job)
        rows = job.batch * job.rollout_batches
        tokens = f"graph of {job.completion} generated tokens in {rows} rows"
        yield added("kept-graph", "generation keeps its graph (no_grad is missing)", tokens, cached)
        uncached = own_code.kept_without_cache(predictor, job)
        yield added("kept-graph-no-cache", "generation keeps its graph and uses no cache", tokens, uncached)
    alive = {phase: memory.allocated_bytes for phase, memory in prediction.phases.items()}
    for phase, size in own_code.materialized_logits(predictor, job).items():
        alive[phase] = size + sum(
            term.low_bytes for term in prediction.terms if term.in_allocator and phase in term.phases
        )
    row = 4 * job.tokens * predictor.shape.vocabulary
    yield Explanation(
        name="logits",
        assumption="the loss materializes the logits of all tokens",
        arithmetic=(
            f"one copy in fp32: 4 B x {job.batch} x {job.length} x {predictor.shape.vocabulary} = ",
            float(row),
            "; several are alive at once",
        ),
        allocated_bytes=max(alive.values()),
    )
