"""The peak of each phase by arithmetic alone: an independent check of what was traced.

Called by `prediction.py`. Knows a decoder with two normalizations, attention without a stored matrix, and a gated or plain MLP; it
is right to about 30 %. A trace that is further from it than `SUSPICIOUS` deserves a look. Pure.
"""

from __future__ import annotations

from grpo_run.trainers.planning.job import DTYPE_BYTES, Job
from grpo_run.trainers.planning.model_config import Shape

SUSPICIOUS = 1.5
"""Ratio of the two, either way, above which the output says that they disagree."""
TILE_TOKENS, TILE_WORDS = 4096, 32768
"""Tile of TRL's language-model head: tokens and words of the vocabulary."""
CPU_TILES_FORWARD, CPU_TILES_BACKWARD = 4, 7
"""Tiles in fp32 that the head keeps at once where it has no Triton kernel."""
STATES = {"adamw_torch_fused": 2, "adamw_torch": 2, "adafactor": 0, "sgd": 0}
"""Tensors of the weights' size that an optimizer keeps."""


def peaks(job: Job, shape: Shape) -> dict[str, float]:
    """Return the bytes that one rank needs in each phase, without what `terms.py` adds."""
    width = DTYPE_BYTES[job.weights]
    compute = 2 if job.autocast else width
    weights = shape.parameters * width
    states = STATES[job.optimizer] * weights
    fully = job.ranks if job.layout in ("zero3", "fsdp") else 1
    partly = fully if job.layout != "zero2" else job.ranks
    kept = (weights * (2 if job.reference else 1)) / fully + states / partly
    copies = shape.parameters * compute if job.autocast and width > compute else 0
    layer = job.tokens * _layer_values(shape, compute)
    one = job.tokens * shape.hidden * (4 if job.autocast else compute)
    activations = shape.layers * one + layer if job.checkpointing else shape.layers * layer
    forward_head, backward_head = _head(job, shape, compute)
    at_start = activations + backward_head + shape.vocabulary * shape.hidden * 4
    at_end = weights / partly + layer + (one if job.checkpointing else 0)
    update = weights / partly if job.optimizer == "adamw_torch" else 0
    return {
        "score": kept + copies + layer / 3 + forward_head,
        "forward": kept + copies + activations + forward_head,
        "backward": kept + max(copies + at_start, at_end),
        "optimizer": kept + weights / partly + update,
    }


def _layer_values(shape: Shape, width: int) -> float:
    """Bytes per token of what one layer keeps for backward: residuals, normalizations, attention, MLP."""
    attention = 2 * shape.heads * shape.head_size + 4 * shape.heads * shape.head_size
    return float(width * (6 * shape.hidden + attention + 4 * shape.intermediate))


def _head(job: Job, shape: Shape, width: int) -> tuple[float, float]:
    valid = job.batch * job.completion if job.device == "cuda" else job.tokens
    tile = min(valid, TILE_TOKENS) * min(shape.vocabulary, TILE_WORDS)
    hidden = valid * shape.hidden * (width + 4)
    if job.device == "cuda":
        return tile * width + hidden, tile * width + hidden
    return tile * (width + 4 * CPU_TILES_FORWARD) + hidden, tile * (width + 4 * CPU_TILES_BACKWARD) + hidden
