"""Memory that a trace does not show: the CUDA context, workspaces, communication, generation and vLLM.

Called by `prediction.py`. Each term is a range and says where it comes from. None of them has been compared with a GPU by this
project. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_run.runtime.continuity.memory.closed_form import LOGIT_COPIES, cache_bytes
from grpo_run.trainers.planning.job import DTYPE_BYTES, Job
from grpo_run.trainers.planning.model_config import Shape
from grpo_run.trainers.planning.sizes import sizes_of
from grpo_run.trainers.planning.timeline import PHASES

MIB = 1 << 20
CONTEXT_BYTES = (226 * MIB, 501 * MIB)
"""CUDA context of an L4 and of an A100, as AgileRL's memory estimator has measured them."""
WORKSPACE_BYTES = (8 * MIB, 64 * MIB)
"""Workspaces of cuBLAS and cuBLASLt: 8 MiB before Hopper, 32 MiB each on Hopper (torch's defaults)."""
NCCL_BYTES = (100 * MIB, 600 * MIB)
"""Buffers of one NCCL communicator and its channels; assumed, it depends on the machine's links."""
VLLM_OUTSIDE_BYTES = (0, 700 * MIB)
"""What vLLM uses beyond its share, as AgileRL has measured it."""
EVERYWHERE = ("generate", *PHASES)


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
    phases: tuple[str, ...] = EVERYWHERE
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
    elif job.generates:
        found = [_cache(job, shape, trained)]
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


def _cache(job: Job, shape: Shape, trained: int) -> Term:
    sizes = sizes_of(job, shape, trained)
    needed = cache_bytes(sizes)
    if shape.cache:
        layers = [one.values * min(job.length, one.longest or job.length) for one in shape.cache]
        # the cache of one layer is copied when a token is appended
        values = (sum(layers) + max(layers)) * sizes.compute_bytes
        needed = sizes.generated_rows * (values + LOGIT_COPIES * 4 * sizes.vocabulary)
    return Term(
        name="KV cache and next logits",
        low_bytes=needed,
        high_bytes=needed,
        provenance=f"arithmetic: {sizes.generated_rows} rows, {LOGIT_COPIES} copies of their next logits in fp32",
        phases=("generate",),
        in_allocator=True,
    )


def _vllm(job: Job, gpu_bytes: int | None) -> list[Term]:
    assert job.vllm_share is not None
    share = job.vllm_share * (gpu_bytes or 0)
    phases = ("generate",) if job.vllm_sleeps else EVERYWHERE
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


def _communication(job: Job, shape: Shape, trained: int) -> list[Term]:
    found = [
        Term(
            name="NCCL",
            low_bytes=NCCL_BYTES[0],
            high_bytes=NCCL_BYTES[1],
            provenance="assumed; it depends on the links",
        )
    ]
    if job.layout == "ddp":
        weight_bytes = trained * (4 if job.lora_rank else DTYPE_BYTES[job.weights])
        found.append(
            Term(
                name="DDP's buckets",
                low_bytes=weight_bytes,
                high_bytes=weight_bytes,
                provenance="a copy of the gradients (gradient_as_bucket_view=False)",
                phases=("forward", "backward", "optimizer"),
                in_allocator=True,
            )
        )
    elif job.layout in ("zero3", "fsdp"):
        head = shape.vocabulary * shape.hidden
        layer = max(0, shape.parameters - head) / shape.layers
        width = DTYPE_BYTES[job.weights]
        found.append(
            Term(
                name="gathered layers",
                low_bytes=width * max(layer, head),
                high_bytes=width * (2 * layer + head),
                provenance="one layer or the head, up to two layers with prefetch and the head",
                phases=("score", "forward", "backward"),
                in_allocator=True,
            )
        )
    return found


def share_of_rank(job: Job, kind: str) -> float:
    """Return the share of a kind that one rank holds."""
    if job.layout in ("zero3", "fsdp") and kind in ("weights", "gradients", "optimizer"):
        return 1 / job.ranks
    if job.layout == "zero2" and kind in ("gradients", "optimizer"):
        return 1 / job.ranks
    return 1.0
