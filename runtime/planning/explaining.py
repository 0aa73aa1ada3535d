"""Explain observed memory: which assumptions about a job would account for what was observed.

Each single assumption is predicted again and ordered by how close it comes. Pairs are tried where no single
one is close enough. A pair says less, because some of many pairs come close by chance: only close pairs are
returned whose members each bring it closer. Code that scripts write themselves, such as generation that
keeps its graph and logits of a whole micro-batch, is traced with the job's model on fake tensors. Memory
that grows is explained by what every step would have to keep: a job whose rows have one length needs as
much in its second step as in its thousandth. Called by `cli/plan.py` and `cli/planning/explained.py`. Says
what an observation is consistent with; proves nothing about the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from grpo_run.runtime.planning._terms import counted
from grpo_run.runtime.planning._trace import Trace, open_trace
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.prediction import Prediction, Predictor
from grpo_run.runtime.planning.timeline import KINDS, peaks

GENERATED = (2, 4, 6)
"""Generated tokens after which the kept graph is measured; it grows with the square of their number."""


def kept_with_cache(predictor: Predictor, job: Job) -> float:
    """Return the bytes of the graph of a whole generation with a cache of keys and values and without
    `no_grad`.
    """
    rows = job.batch * job.rollout_batches

    def measure(trace: Trace) -> list[float]:
        sizes, kept = [], []
        before = trace.tracker.alive_bytes()
        with trace.trainer.accelerator.autocast():
            result = _forward(trace, _zeros(rows, job.prompt), use_cache=True, logits_to_keep=1)
            for number in range(1, GENERATED[-1] + 1):
                cache = result.past_key_values
                result = _forward(trace, _zeros(rows, 1), past_key_values=cache, use_cache=True)
                kept.append(result.logits)
                if number in GENERATED:
                    sizes.append(float(trace.tracker.alive_bytes() - before))
        return sizes

    return _quadratic(GENERATED, _all_layers(predictor, job, measure), job.completion)


def kept_without_cache(predictor: Predictor, job: Job) -> float:
    """Return the bytes of the graphs of a generation that runs the model over all tokens for each new one."""
    rows, longest = job.batch * job.rollout_batches, job.length
    lengths = sorted({job.prompt + 1, job.prompt + 1 + job.completion // 2, longest})
    if len(lengths) < len(GENERATED):
        lengths = [job.prompt, job.prompt + 1, job.prompt + 2]

    def measure(trace: Trace) -> list[float]:
        sizes = []
        for length in lengths:
            before = trace.tracker.alive_bytes()
            logits = _forward(trace, _zeros(rows, length)).logits
            sizes.append(float(trace.tracker.alive_bytes() - before))
            del logits
        return sizes

    sizes = _all_layers(predictor, job, measure)
    return sum(_quadratic(lengths, sizes, length) for length in range(job.prompt + 1, longest + 1))


def kept_by_a_loss(predictor: Predictor, job: Job) -> tuple[float, float]:
    """Return the bytes that the graph of one micro-batch's loss keeps: of TRL's loss, and of one that
    materializes all logits.
    """

    def measure(trace: Trace) -> list[float]:
        trace.checkpoint()
        before = trace.tracker.alive_bytes()
        loss = trace.loss(job.batch, job.completion)
        whole = float(trace.tracker.alive_bytes() - before)
        del loss
        ids = _zeros(job.batch, job.length)
        before = trace.tracker.alive_bytes()
        kept = _all_logits(trace, ids)
        materialized = float(trace.tracker.alive_bytes() - before)
        del kept
        return [whole, materialized]

    whole, materialized = _all_layers(predictor, job, measure)
    return whole, materialized


def materialized_logits(predictor: Predictor, job: Job) -> dict[str, float]:
    """Return the peaks of forward and backward in a step whose loop computes the logits of all tokens, a
    log-softmax, and gathers.
    """
    windows: list[tuple[str, int]] = []
    weigh = counted(job)

    def measure(trace: Trace) -> list[float]:
        trainer, tracker = trace.trainer, trace.tracker
        trace.step(job.batch, job.completion)  # the optimizer has state afterwards
        trace.checkpoint()
        ids = _zeros(job.batch, job.length)
        for _ in range(min(2, job.accumulation)):  # gradients are alive from the second micro-batch on
            tracker.begin("forward", -2)
            logits, chosen = _all_logits(trace, ids)
            tracker.begin("backward", -2)
            chosen.mean().backward()
            del logits, chosen
            gradients = [one.grad for one in trainer.model.parameters() if one.grad is not None]
            tracker.classify(gradients, "gradients")
        tracker.begin("end", -2)
        found = peaks(trace.tracker.timeline, -2, weigh)
        windows[:] = found
        return [peak.total for peak in found.values()]

    by_phase: dict[str, float] = {}
    for size, (phase, _) in zip(_all_layers(predictor, job, measure), windows, strict=True):
        by_phase[phase] = max(size, by_phase.get(phase, 0.0))
    return by_phase


def _zeros(rows: int, length: int) -> Any:
    import torch

    return torch.zeros(rows, length, dtype=torch.long)


def _forward(trace: Trace, ids: Any, **keywords: Any) -> Any:
    """Call the model as a script's own code does."""
    with trace.trainer.accelerator.autocast():
        return trace.trainer.model(input_ids=ids, **keywords)


def _all_logits(trace: Trace, ids: Any) -> tuple[Any, Any]:
    """Return the logits of all tokens, and the log-probabilities of the tokens."""
    logits = _forward(trace, ids, use_cache=False).logits[:, :-1].float()
    return logits, logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1))


def _all_layers(predictor: Predictor, job: Job, measure: Callable[[Trace], list[float]]) -> list[float]:
    """Return what is measured on a trace, for all layers."""
    found = []
    for depth in predictor.depths:
        with open_trace(job, predictor.config, depth) as trace:
            trace.checkpoint(enabled=False)
            trace.trainer.model.train()
            found.append(measure(trace))
    if len(found) == 1:
        return found[0]
    few, more = predictor.depths
    share = (predictor.shape.layers - more) / (more - few)
    return [second + share * (second - first) for first, second in zip(*found, strict=True)]


def _quadratic(at: Sequence[int], values: Sequence[float], wanted: int) -> float:
    """Return the value of the parabola through three points."""
    total = 0.0
    for index, (here, value) in enumerate(zip(at, values, strict=True)):
        for other_index, other in enumerate(at):
            if other_index != index:
                value *= (wanted - other) / (here - other)
        total += value
    return total


Arithmetic = tuple[str | float, ...]
"""Texts, and sizes in bytes between them, which are printed in one unit."""
VISIBLE_SHARE, VISIBLE_BYTES = 0.01, (1 << 20) / 20
"""A part of a peak that is smaller than this share of it, or than this size, is not named in its
arithmetic.
"""
SAME = 0.001
"""Share of the described job's figure by which that of an assumption differs at least; else the two cannot be
told apart.
"""
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
    """Return the assumptions with which the peak is that of the job as it is described, so that no
    observation shows them.
    """
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
    found = [explained_by_trace(prediction, DESCRIBED, "the job is as described")]
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
    """Yield the assumptions with which a job is another one: name, what would have to be true, and changed
    fields.

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
        cached = kept_with_cache(predictor, job)
        rows = job.batch * job.rollout_batches
        tokens = f"graph of {job.completion} generated tokens in {rows} rows"
        yield added("kept-graph", "generation keeps its graph (no_grad is missing)", tokens, cached)
        uncached = kept_without_cache(predictor, job)
        yield added("kept-graph-no-cache", "generation keeps its graph and uses no cache", tokens, uncached)
    alive = {phase: memory.allocated_bytes for phase, memory in prediction.phases.items()}
    for phase, size in materialized_logits(predictor, job).items():
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


CLOSE = 1.25
"""Ratio of a figure to the observation, either way, up to which it is said to account for it."""
MOST = 4
"""Pairs that are returned."""
TRACED = 8
"""Pairs of changed jobs that are traced, those first whose sum is nearest."""


def together(
    predictor: Predictor, prediction: Prediction, alone: Sequence[Explanation], observed_bytes: float
) -> list[Explanation]:
    """Return pairs of assumptions that account for an observation better than both of their members, the best
    fit first.

    Args:
        predictor: of the model.
        prediction: of the job as it is described.
        alone: single assumptions.
        observed_bytes: what was observed.
    """
    base = prediction.allocated_bytes
    pairs = [
        (one, other, base + sum(member.allocated_bytes - base for member in (one, other)))
        for one, other in combinations(alone, 2)
        if one.combines and other.combines and not one.changes.keys() & other.changes.keys()
    ]
    pairs.sort(key=lambda pair: abs(math.log(max(pair[2], 1.0) / observed_bytes)))
    found, traced = [], 0
    for one, other, size in pairs:
        name, assumption = f"{one.name}+{other.name}", f"{one.assumption}, and {other.assumption}"
        if one.changes and other.changes:
            if traced == TRACED:
                continue
            traced += 1
            job = replace(prediction.job, **one.changes, **other.changes)
            pair = explained_by_trace(predictor.predict(job), name, assumption)
        else:
            added = [(f" + {member.name} ", member.allocated_bytes - base) for member in (one, other)]
            arithmetic: Arithmetic = ("as described ", base, *added[0], *added[1])
            pair = Explanation(name=name, assumption=assumption, arithmetic=arithmetic, allocated_bytes=size)
        nearest = min(one.distance(observed_bytes), other.distance(observed_bytes))
        if pair.distance(observed_bytes) < min(nearest, math.log(CLOSE)):
            found.append(pair)
    return sorted(found, key=lambda pair: pair.distance(observed_bytes))[:MOST]


ADDED = {
    "second-optimizer": "an optimizer with its state",
    "second-weights": "a copy of the weights",
    "kept-graph": "the graph of the generation (no_grad is missing)",
    "kept-graph-no-cache": "the graph of a generation without a cache (no_grad is missing)",
}
"""Assumptions whose size may be kept once a step, and what is kept then."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What every step may keep.

    Attributes:
        name: a short word for it, for programs.
        what: in words.
        step_bytes: of one step.
    """

    name: str
    what: str
    step_bytes: float


@dataclass(frozen=True, kw_only=True)
class GrowthPerStep:
    """A growth that was observed.

    Attributes:
        start_bytes: peak of the job as it is described.
        steps: the fewest and the most after which the observed size was reached.
        kept: what every step may keep.
    """

    start_bytes: float
    steps: tuple[int, int]
    kept: Sequence[Kept]

    def a_step(self, observed_bytes: float) -> tuple[float, float]:
        """Return the least and the most that a step keeps, in bytes; nothing if the job needs more from the
        start.
        """
        grown = max(0.0, observed_bytes - self.start_bytes)
        return grown / self.steps[1], grown / self.steps[0]

    def reached_after(self, one: Kept, observed_bytes: float) -> int:
        """Return the step in which the observed size is reached."""
        return max(1, math.ceil((observed_bytes - self.start_bytes) / one.step_bytes))

    def fits(self, one: Kept, observed_bytes: float) -> bool:
        """Whether that step is one of those that were observed."""
        return (
            self.start_bytes < observed_bytes
            and self.steps[0] <= self.reached_after(one, observed_bytes) <= self.steps[1]
        )

    def ranked(self, observed_bytes: float) -> list[Kept]:
        """Return what may be kept, the nearest to the middle of the observed growth first."""
        low, high = (math.log(max(1.0, size)) for size in self.a_step(observed_bytes))
        return sorted(self.kept, key=lambda one: abs(math.log(one.step_bytes) - (low + high) / 2))


def kept_each_step(predictor: Predictor, prediction: Prediction, alone: Sequence[Explanation]) -> list[Kept]:
    """Return what a step may keep, and its size.

    Args:
        predictor: of the model.
        prediction: of the job as it is described.
        alone: single assumptions about it.
    """
    job = prediction.job.as_run
    added = [
        (one.name, ADDED[one.name], one.allocated_bytes - prediction.allocated_bytes)
        for one in alone
        if one.name in ADDED
    ]
    whole, materialized = kept_by_a_loss(predictor, job)
    logits = 4 * job.tokens * predictor.shape.vocabulary
    found = (
        *added,
        ("gradients", "a copy of the gradients", prediction.phases["optimizer"].traced.get("gradients", 0.0)),
        ("loss", "the graph of TRL's loss (retain_graph=True)", job.accumulation * whole),
        (
            "loss-logits",
            (
                "the graph of a loss that materializes all logits (retain_graph=True, or logits that are kept"
                " without detach)"
            ),
            job.accumulation * materialized,
        ),
        ("logits", "the logits of all tokens in fp32, without their graph", job.accumulation * logits),
    )
    return [Kept(name=name, what=what, step_bytes=size) for name, what, size in found if size > 0]
