"""Traces of code that scripts write themselves: generation that keeps its graph, and logits of a whole micro-batch.

Called by `assumptions.py`. The model is the job's, run on fake tensors; only the loop around it is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_run.trainers.planning.allocator import rounded
from grpo_run.trainers.planning.job import Job
from grpo_run.trainers.planning.prediction import Predictor
from grpo_run.trainers.planning.terms import share_of_rank
from grpo_run.trainers.planning.timeline import peaks
from grpo_run.trainers.planning.traces.trace import Trace, open_trace

GENERATED = (2, 4, 6)
"""Generated tokens after which the kept graph is measured; it grows with the square of their number."""


def kept_with_cache(predictor: Predictor, job: Job) -> float:
    """Return the bytes of the graph of a whole generation with a cache of keys and values and without `no_grad`."""
    rows = job.batch * job.rollout_batches

    def measure(trace: Trace) -> list[float]:
        import torch

        model, sizes, kept = trace.trainer.model, [], []
        before = trace.tracker.alive_bytes()
        with trace.trainer.accelerator.autocast():
            prompt = torch.zeros(rows, job.prompt, dtype=torch.long)
            result = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
            for number in range(1, GENERATED[-1] + 1):
                token = torch.zeros(rows, 1, dtype=torch.long)
                result = model(input_ids=token, past_key_values=result.past_key_values, use_cache=True)
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
        import torch

        sizes = []
        for length in lengths:
            before = trace.tracker.alive_bytes()
            with trace.trainer.accelerator.autocast():
                logits = trace.trainer.model(input_ids=torch.zeros(rows, length, dtype=torch.long)).logits
            sizes.append(float(trace.tracker.alive_bytes() - before))
            del logits
        return sizes

    sizes = _all_layers(predictor, job, measure)
    return sum(_quadratic(lengths, sizes, length) for length in range(job.prompt + 1, longest + 1))


def kept_by_a_loss(predictor: Predictor, job: Job) -> tuple[float, float]:
    """Return the bytes that the graph of one micro-batch's loss keeps: of TRL's loss, and of one that materializes all logits."""

    def measure(trace: Trace) -> list[float]:
        import torch

        trace.checkpoint()
        before = trace.tracker.alive_bytes()
        loss = trace.loss(job.batch, job.completion)
        sizes = [float(trace.tracker.alive_bytes() - before)]
        del loss
        ids = torch.zeros(job.batch, job.length, dtype=torch.long)
        before = trace.tracker.alive_bytes()
        with trace.trainer.accelerator.autocast():
            logits = trace.trainer.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1))
        return [*sizes, float(trace.tracker.alive_bytes() - before) + 0 * chosen.numel()]

    whole, materialized = _all_layers(predictor, job, measure)
    return whole, materialized


def materialized_logits(predictor: Predictor, job: Job) -> dict[str, float]:
    """Return the peaks of forward and backward in a step whose loop computes the logits of all tokens, a log-softmax, and gathers."""
    windows: list[tuple[str, int]] = []

    def weigh(size: int, kind: str) -> float:
        return (rounded(size) if job.device == "cuda" else size) * share_of_rank(job, kind)

    def measure(trace: Trace) -> list[float]:
        import torch

        trainer, tracker = trace.trainer, trace.tracker
        trace.step(job.batch, job.completion)  # the optimizer has state afterwards
        trace.checkpoint()
        ids = torch.zeros(job.batch, job.length, dtype=torch.long)
        for _ in range(min(2, job.accumulation)):  # gradients are alive from the second micro-batch on
            tracker.begin("forward", -2)
            with trainer.accelerator.autocast():
                logits = trainer.model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            chosen = logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1))
            tracker.begin("backward", -2)
            chosen.mean().backward()
            del logits, chosen
            gradients = [one.grad for one in trainer.model.parameters() if one.grad is not None]
            tracker.classify(gradients, "gradients")
        tracker.begin("end", -2)
        found = peaks(trace.timeline, -2, weigh)
        windows[:] = found
        return [peak.total for peak in found.values()]

    sizes = _all_layers(predictor, job, measure)
    by_phase: dict[str, float] = {}
    for (phase, _), size in zip(windows, sizes, strict=True):
        by_phase[phase] = max(size, by_phase.get(phase, 0.0))
    return by_phase


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
