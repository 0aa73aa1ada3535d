"""Memory that a trace does not show, and the sizes that the closed form needs to check a trace.

The terms are the CUDA context, workspaces, communication, what DeepSpeed keeps, and vLLM. Each is a range
and says where it comes from. None of them has been compared with a GPU by this project. The closed form
itself is `runtime/memory/closed_form.py`. Called by `prediction.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_run.runtime.memory.closed_form import Sizes
from grpo_run.runtime.planning._allocator import rounded
from grpo_run.runtime.planning.job import DTYPE_BYTES, NAMED_OPTIMIZERS, Job
from grpo_run.runtime.planning.model_config import Shape
from grpo_run.runtime.planning.timeline import PHASES, Weigh

MIB = 1 << 20
CONTEXT_BYTES = (226 * MIB, 501 * MIB)
"""CUDA context of an L4 and of an A100, as AgileRL's memory estimator has measured them."""
WORKSPACE_BYTES = (8 * MIB, 64 * MIB)
"""Workspaces of cuBLAS and cuBLASLt: 8 MiB before Hopper, 32 MiB each on Hopper (torch's defaults)."""
NCCL_BYTES = (100 * MIB, 600 * MIB)
"""Buffers of one NCCL communicator and its channels; assumed, it depends on the machine's links."""
VLLM_OUTSIDE_BYTES = (0, 700 * MIB)
"""What vLLM uses beyond its share, as AgileRL has measured it."""
BUCKET = 500_000_000
"""DeepSpeed's default of `reduce_bucket_size`, in values; transformers and accelerate turn `auto` into the
hidden size squared.
"""
REUSED_WITHIN = 1_000_000_000
"""DeepSpeed's defaults of `stage3_max_reuse_distance` and `stage3_max_live_parameters`. Where transformers
generates, TRL removes DeepSpeed's hooks and sets them again, and with them what DeepSpeed knows of reuse:
then weights are freed after each use."""
TRACED = tuple(phase for phase in PHASES if phase != "optimizer")


@dataclass(frozen=True, kw_only=True)
class Term:
    """Memory that is added to what was traced.

    Attributes:
        name: what uses it.
        low_bytes, high_bytes: its range; equal where it is arithmetic.
        provenance: where the figures come from.
        phases: when it is used.
        in_allocator: it is part of torch's `max_memory_allocated`.
    """

    name: str
    low_bytes: float
    high_bytes: float
    provenance: str
    phases: tuple[str, ...] = PHASES
    in_allocator: bool = False


def terms(job: Job, shape: Shape, gpu_bytes: int | None, trained: int) -> list[Term]:
    """Return the terms of a job on one rank.

    Args:
        job: sizes and settings.
        shape: of the model.
        gpu_bytes: memory of the GPU, for vLLM's share; without it that share is not counted.
        trained: how many parameters are trained.
    """
    found: list[Term] = []
    if job.vllm_share is not None:
        found = _vllm(job, gpu_bytes)
    if job.device == "cuda":
        found.append(
            Term(
                name="CUDA context",
                low_bytes=CONTEXT_BYTES[0],
                high_bytes=CONTEXT_BYTES[1],
                provenance="measured by AgileRL on L4 and A100",
            )
        )
        found.append(
            Term(
                name="cuBLAS workspaces",
                low_bytes=WORKSPACE_BYTES[0],
                high_bytes=WORKSPACE_BYTES[1],
                provenance="torch's defaults, before and on Hopper",
            )
        )
    if job.ranks > 1:
        found += _communication(job, shape, trained)
    return found


def _vllm(job: Job, gpu_bytes: int | None) -> list[Term]:
    assert job.vllm_share is not None
    share = job.vllm_share * (gpu_bytes or 0)
    phases = ("generate",) if job.vllm_sleeps else PHASES
    found = [
        Term(
            name="vLLM's share",
            low_bytes=share,
            high_bytes=share,
            provenance=f"{job.vllm_share:g} of the GPU",
            phases=phases,
        )
    ]
    low, high = VLLM_OUTSIDE_BYTES
    found.append(
        Term(
            name="vLLM beyond its share",
            low_bytes=low,
            high_bytes=high,
            provenance="measured by AgileRL, about 700 MiB",
        )
    )
    return found


def _communication(job: Job, shape: Shape, trained: int) -> Iterator[Term]:
    if job.device == "cuda":
        yield Term(
            name="NCCL",
            low_bytes=NCCL_BYTES[0],
            high_bytes=NCCL_BYTES[1],
            provenance="assumed; it depends on the links",
        )
    if job.layout == "ddp":
        weight_bytes = trained * (4 if job.lora_rank else DTYPE_BYTES[job.weights])
        yield Term(
            name="DDP's buckets",
            low_bytes=weight_bytes,
            high_bytes=weight_bytes,
            provenance="a copy of the gradients (gradient_as_bucket_view=False)",
            phases=("forward", "backward", "optimizer"),
            in_allocator=True,
        )
    if job.layout in ("zero3", "fsdp"):
        yield from _gathered(job, shape)
    if job.deepspeed:
        yield from _deepspeed(job, shape, trained)


def _gathered(job: Job, shape: Shape) -> Iterator[Term]:
    head = shape.vocabulary * shape.hidden
    layer = max(0, shape.parameters - head) / shape.layers
    width = DTYPE_BYTES[job.weights]
    whole = job.layout == "zero3" and job.gathers and job.transformers_generates
    kept = 0 if job.layout == "fsdp" or whole else min(shape.parameters, REUSED_WITHIN)
    yield Term(
        name="gathered layers",
        low_bytes=width * max(layer, head),
        high_bytes=width * max(2 * layer + head, kept),
        provenance="one layer or the head, up to two layers with prefetch and the head"
        + (", or all that is used again within stage3_max_reuse_distance" if kept else ""),
        phases=tuple(phase for phase in TRACED if phase != "generate" or not whole),
        in_allocator=True,
    )
    if whole:
        yield Term(
            name="gathered model",
            low_bytes=width * shape.parameters,
            high_bytes=width * shape.parameters,
            provenance="TRL gathers the whole model to generate (ds3_gather_for_generation=True)",
            phases=("generate",),
            in_allocator=True,
        )


def _deepspeed(job: Job, shape: Shape, trained: int) -> Iterator[Term]:
    width, share, head = DTYPE_BYTES[job.weights], trained / job.ranks, shape.vocabulary * shape.hidden
    yield Term(
        name="DeepSpeed's fp32 weights",
        low_bytes=4 * share,
        high_bytes=4 * share,
        provenance="a copy of this rank's share, also of fp32 weights",
        in_allocator=True,
    )
    if job.layout == "zero3":
        yield Term(
            name="DeepSpeed's gradients",
            low_bytes=width * share,
            high_bytes=width * share,
            provenance="one buffer for this rank's share, always allocated",
            in_allocator=True,
        )
    update = (4 + (width if width < 4 else 0)) * share
    yield Term(
        name="gradients in fp32",
        low_bytes=update,
        high_bytes=update,
        provenance="this rank's share is flattened and cast for the update",
        phases=("optimizer",),
        in_allocator=True,
    )
    yield Term(
        name="reduce bucket",
        # ZeRO-2 keeps the largest gradient apart if the bucket is smaller
        low_bytes=width * (shape.hidden**2 + (head if job.layout == "zero2" else 0)),
        high_bytes=width * max(BUCKET, shape.hidden**2 + head),
        provenance='reduce_bucket_size: from "auto" to DeepSpeed\'s default of 500 M values',
        in_allocator=True,
    )


def counted(job: Job) -> Weigh:
    """Return what one rank's allocator counts for a traced allocation of a job."""

    def weigh(size: int, kind: str) -> float:
        return (rounded(size) if job.device == "cuda" else size) * share_of_rank(job, kind)

    return weigh


def share_of_rank(job: Job, kind: str) -> float:
    """Return the share of a kind that one rank holds."""
    if job.layout == "zero3" and kind == "gradients":
        return 0.0  # a term: the buffer is there in all phases
    if job.deepspeed and kind == "optimizer":
        # the traced state has the type of the weights; bitsandbytes' has its own
        return (1 if job.optimizer in NAMED_OPTIMIZERS else 4 / DTYPE_BYTES[job.weights]) / job.ranks
    if job.layout in ("zero3", "fsdp") and kind in ("weights", "gradients", "optimizer"):
        return 1 / job.ranks
    if job.layout == "zero2" and kind == "gradients":
        return 1 / job.ranks
    return 1.0


SUSPICIOUS = 1.5
"""Ratio of trace and closed form, either way, above which the output says that they disagree."""
STATES = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}
"""Tensors of the weights' size that an optimizer keeps."""
ADAPTER_BYTES = 4
"""peft keeps adapters in fp32."""


def sizes_of(job: Job, shape: Shape, trained: int) -> Sizes:
    """Return the sizes of a job on one rank.

    Args:
        job: sizes and settings.
        shape: of the model.
        trained: how many parameters are trained: all of them, or those of adapters, which are kept in fp32.
    """
    fully = job.ranks if job.layout in ("zero3", "fsdp") else 1
    partly = job.ranks if job.layout == "zero2" else fully
    width = DTYPE_BYTES[job.weights]
    if job.lora_rank:
        trained = trained * ADAPTER_BYTES // width  # counted in values of the weights' type
    return Sizes(
        parameters=shape.parameters + (trained if job.lora_rank else 0),
        trained=trained,
        value_bytes=width,
        autocast=job.autocast,
        reference=job.reference and not job.lora_rank,
        optimizer_states=_states(job, width),
        whole_update=job.optimizer == "adamw_torch",
        weight_shards=fully,
        gradient_shards=partly,
        optimizer_shards=partly,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        key_value_heads=shape.key_value_heads,
        head_size=shape.head_size,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        rows=job.batch,
        row_tokens=job.length,
        scored_tokens=job.completion,
        checkpointing=job.checkpointing,
        accumulates=job.accumulation > 1,
        generated_rows=job.batch * job.rollout_batches if job.transformers_generates else 0,
        on_gpu=job.device == "cuda",
    )


def _states(job: Job, width: int) -> float:
    if job.optimizer in NAMED_OPTIMIZERS:
        count, state_width = NAMED_OPTIMIZERS[job.optimizer]
        return count * state_width / width
    if job.deepspeed:
        return STATES[job.optimizer] * 4 / width
    return STATES[job.optimizer]
