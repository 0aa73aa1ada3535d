"""What fits on a GPU, and which single changes need less memory, each predicted again.

Called by `cli/plan.py`. Does not say whether a change is right for an experiment; it says
what it costs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning.job import NAMED_OPTIMIZERS, Job
from grpo_run.runtime.planning.model_config import default_attention
from grpo_run.runtime.planning.prediction import Prediction, Predictor

LORA_RANK = 16
EIGHT_BITS = "adamw_bnb_8bit"


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of a job.

    Attributes:
        name: what to set.
        cost: what it costs, in a few words.
        exact: the optimizer takes the same steps; otherwise training is another one.
        job: with the change; the same one if only the allocator is set otherwise, which has no memory then
            that it cannot use.
    """

    name: str
    cost: str
    exact: bool
    job: Job


@dataclass(frozen=True, kw_only=True)
class ChangeOutcome:
    """A change and what was predicted for it, in bytes of device memory."""

    change: Change
    high_bytes: float
    saved_bytes: float
    fits: bool | None


def candidates(job: Job, *, has_fused_attention: bool = True) -> Iterator[Change]:
    """Yield the changes that apply to a job, in the order in which to try them: length, group, checkpointing,
    batch, precision, fused attention, and what else there is.
    """

    def same(name: str, cost: str, **fields: Any) -> Change:
        return Change(name=name, cost=cost, exact=True, job=replace(job, **fields))

    def other(name: str, cost: str, **fields: Any) -> Change:
        return replace(same(name, cost, **fields), exact=False)

    if job.completion > 3:
        name, shorter = "max_completion_length" if job.generates else "max_length", job.completion // 2
        yield other(f"{name}={shorter}", "another experiment", completion=shorter)
    half, group = job.batch // 2, job.num_generations // 2
    if group >= 2 and job.num_generations % 2 == 0 and job.batch % 2 == 0:
        name = f"num_generations={group}, per_device_train_batch_size={half}"
        yield other(name, "a group of half the size, with more noise", batch=half, num_generations=group)
    if not job.checkpointing:
        yield same("gradient_checkpointing=True", "one more forward pass", checkpointing=True)
    if job.batch % 2 == 0:
        yield same(
            f"per_device_train_batch_size={half}, accumulation x2", "smaller matrices", batch=half,
            accumulation=2 * job.accumulation, rollout_batches=2 * job.rollout_batches,
        )  # fmt: skip
    if job.as_run.weights == "float32":
        yield other("weights in bfloat16", "updates are rounded to 8 bits", weights="bfloat16")
    if job.optimizer not in NAMED_OPTIMIZERS and not job.deepspeed:
        cost = "the optimizer's state is rounded to 8 bits"
        yield other(f"optim={EIGHT_BITS!r}", cost, optimizer=EIGHT_BITS)
    if job.attention == "eager" and has_fused_attention:
        yield other("attn_implementation='sdpa'", "rounds otherwise", attention="sdpa")
    if job.device == "cuda":
        yield same("PYTORCH_ALLOC_CONF=expandable_segments:True", "none; less fragmentation")
    if job.vllm_share is not None and not job.vllm_sleeps:
        yield same("vllm_enable_sleep_mode=True", "vLLM wakes once per rollout", vllm_sleeps=True)
    if job.ranks > 1 and job.layout == "ddp":
        yield same("DeepSpeed zero2", "none or little", layout="zero2")
        yield same("DeepSpeed zero3", "weights are gathered per layer", layout="zero3")
    if job.layout == "zero3" and job.gathers and job.transformers_generates:
        cost = "weights are gathered again for every token"
        yield same("ds3_gather_for_generation=False", cost, gathers=False)
    if not job.lora_rank:
        name = f"LoRA of rank {LORA_RANK} (peft_config)"
        yield other(name, "only adapters are trained", lora_rank=LORA_RANK)
    if job.reference:
        yield other("beta=0.0, no reference model", "another loss", reference=False)


def try_changes(predictor: Predictor, before: Prediction) -> list[ChangeOutcome]:
    """Predict every change; those that fit first, each in the order of `candidates`."""
    outcomes = []
    fused = default_attention(predictor.config) != "eager"
    for change in candidates(before.job, has_fused_attention=fused):
        try:
            high = (
                before.high_bytes - before.fragmentation_bytes
                if change.job == before.job
                else predictor.predict(change.job).high_bytes
            )
        except ConfigError:  # peft is not installed, or knows no modules of this model
            continue
        fits = None if predictor.gpu_bytes is None else high <= predictor.gpu_bytes
        outcomes.append(
            ChangeOutcome(change=change, high_bytes=high, saved_bytes=before.high_bytes - high, fits=fits)
        )
    useful = [outcome for outcome in outcomes if outcome.saved_bytes > 0]
    return sorted(useful, key=lambda one: not one.fits)


PREDICTIONS = 3
"""Of sizes that may be the largest; one is usually right."""
MOST_ROWS = 1024
"""A larger micro-batch is not looked for: nobody needs it, and losses that go row by row take minutes."""


def largest_batch(predictor: Predictor, found: Prediction) -> int | None:
    """Return the most rows of a micro-batch that fit, up to `MOST_ROWS`; None without any or without a GPU.

    A phase grows linearly with the rows, in pieces: what follows from two predictions is predicted itself,
    and corrected if it does not fit. The rollout of all ranks has whole groups of `num_generations`, as TRL
    demands.
    """
    job, gpu_bytes = found.job, predictor.gpu_bytes
    if gpu_bytes is None or 2 * job.batch > MOST_ROWS:
        return None
    unit = rows_of_unit(job)
    other = predictor.predict(replace(job, batch=2 * job.batch))
    for _ in range(PREDICTIONS):
        rows = int(_rows_that_fit(found, other, gpu_bytes) // unit) * unit
        if rows < 1:
            return None
        if rows == job.batch:
            return rows
        other = predictor.predict(replace(job, batch=rows))
        if other.high_bytes <= gpu_bytes:
            return rows
    return None


def rows_of_unit(job: Job) -> int:
    """Return by how many rows a micro-batch grows, so that the rollout of all ranks has whole groups."""
    return job.num_generations // math.gcd(job.num_generations, job.ranks * job.rollout_batches) or 1


def _rows_that_fit(found: Prediction, other: Prediction, gpu_bytes: int) -> float:
    """Return the rows at which the first phase needs the whole GPU, on lines through two predictions."""
    most = float(MOST_ROWS)
    for phase, memory in found.phases.items():
        grown = other.phases[phase].high_bytes - memory.high_bytes
        per_row = grown / (other.job.batch - found.job.batch)
        room = gpu_bytes - memory.high_bytes
        if per_row > 0:
            most = min(most, found.job.batch + room / per_row)
        elif room < 0:
            return 0.0
    return most
