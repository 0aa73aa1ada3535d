"""Memory that a trace does not show, and the share of a rank in what it shows.

The terms are the CUDA context, workspaces, communication, what DeepSpeed keeps, and vLLM. Each is a range
and says where it comes from. None of them has been compared with a GPU by this project. Called by
`prediction.py` and `changes.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from grpo_run.runtime.planning.job import DTYPE_BYTES, NAMED_OPTIMIZERS, PHASES, Job
from grpo_run.runtime.planning.model_config import Shape

MIB = 1 << 20
ROUNDING = 512
"""What torch's CUDA allocator rounds a request up to, in bytes."""
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


class Term(NamedTuple):
    """Memory that is added to what was traced.

    Args:
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
    return [*_outside_torch(job, gpu_bytes), *(_communication(job, shape, trained) if job.ranks > 1 else ())]


def _outside_torch(job: Job, gpu_bytes: int | None) -> Iterator[Term]:
    if job.vllm_share is not None:
        share, phases = job.vllm_share * (gpu_bytes or 0), ("generate",) if job.vllm_sleeps else PHASES
        yield Term("vLLM's share", share, share, f"{job.vllm_share:g} of the GPU", phases)
        yield Term("vLLM beyond its share", *VLLM_OUTSIDE_BYTES, "measured by AgileRL, about 700 MiB")
    if job.device == "cuda":
        yield Term("CUDA context", *CONTEXT_BYTES, "measured by AgileRL on L4 and A100")
        yield Term("cuBLAS workspaces", *WORKSPACE_BYTES, "torch's defaults, before and on Hopper")
    if job.device == "cuda" and job.ranks > 1:
        yield Term("NCCL", *NCCL_BYTES, "assumed; it depends on the links")


def _communication(job: Job, shape: Shape, trained: int) -> Iterator[Term]:
    if job.layout == "ddp":
        yield _allocated(
            "DDP's buckets", trained * (4 if job.lora_rank else DTYPE_BYTES[job.weights]),
            "a copy of the gradients (gradient_as_bucket_view=False)", ("forward", "backward", "optimizer"),
        )  # fmt: skip
    if job.layout in ("zero3", "fsdp"):
        yield from _gathered(job, shape)
    if job.deepspeed:
        yield from _deepspeed(job, shape, trained)


def _allocated(name: str, size: float, provenance: str, phases: tuple[str, ...] = PHASES) -> Term:
    """Return a term of torch's allocator that is arithmetic."""
    return Term(name, size, size, provenance, phases, in_allocator=True)


def _gathered(job: Job, shape: Shape) -> Iterator[Term]:
    head = shape.vocabulary * shape.hidden
    layer = max(0, shape.parameters - head) / shape.layers
    width = DTYPE_BYTES[job.weights]
    whole = job.layout == "zero3" and job.gathers and job.transformers_generates
    kept = 0 if job.layout == "fsdp" or whole else min(shape.parameters, REUSED_WITHIN)
    yield Term(
        "gathered layers", width * max(layer, head), width * max(2 * layer + head, kept),
        "one layer or the head, up to two layers with prefetch and the head"
        + (", or all that is used again within stage3_max_reuse_distance" if kept else ""),
        tuple(phase for phase in TRACED if phase != "generate" or not whole), in_allocator=True,
    )  # fmt: skip
    if whole:
        source = "TRL gathers the whole model to generate (ds3_gather_for_generation=True)"
        yield _allocated("gathered model", width * shape.parameters, source, ("generate",))


def _deepspeed(job: Job, shape: Shape, trained: int) -> Iterator[Term]:
    width, share, head = DTYPE_BYTES[job.weights], trained / job.ranks, shape.vocabulary * shape.hidden
    own = "a copy of this rank's share, also of fp32 weights"
    yield _allocated("DeepSpeed's fp32 weights", 4 * share, own)
    if job.layout == "zero3":
        buffer = "one buffer for this rank's share, always allocated"
        yield _allocated("DeepSpeed's gradients", width * share, buffer)
    update = "this rank's share is flattened and cast for the update"
    yield _allocated("gradients in fp32", (4 + (width if width < 4 else 0)) * share, update, ("optimizer",))
    # ZeRO-2 keeps the largest gradient apart if the bucket is smaller
    least = shape.hidden**2 + (head if job.layout == "zero2" else 0)
    most = max(BUCKET, shape.hidden**2 + head)
    source = 'reduce_bucket_size: from "auto" to DeepSpeed\'s default of 500 M values'
    yield Term("reduce bucket", width * least, width * most, source, in_allocator=True)


def counted(job: Job) -> Callable[[int, str], float]:
    """Return what one rank's allocator counts for a traced allocation of a job."""

    def weigh(size: int, kind: str) -> float:
        rounded = -(-size // ROUNDING) * ROUNDING if job.device == "cuda" else size
        return rounded * share_of_rank(job, kind)

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
