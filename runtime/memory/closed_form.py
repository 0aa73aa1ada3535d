"""The peak of a rank's memory in each phase of training a decoder, by a closed formula.

    sizes of a job on one rank -> bytes by phase

Compares two memory plans after an out-of-memory error where they cannot be traced
(`runtime.supervisor.memory._prediction`). It is right to about 30 %. The terms:

- weights, gradients and the states of the optimizer, divided by the ranks where the layout shards them;
- activations of a token and layer that are kept for the backward pass: residuals, two normalizations,
  attention without a stored matrix, and a gated MLP (Korthikanti et al., "Reducing Activation Recomputation
  in Large Transformer Models", section 4, without dropout). Gradient checkpointing keeps the input of each
  layer and computes one layer again;
- tiles of the language-model head, which TRL computes in parts, so no logits of a whole micro-batch are held;
- gradients of earlier micro-batches, which are alive in the forward pass if gradients are accumulated;
- the cache of keys and values, and logits of the next token, in generation.

What is outside torch's allocator, what vLLM reserves and what is fragmented is left to the callers. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

TILE_TOKENS, TILE_WORDS = 4096, 32768
"""Tile of TRL's language-model head: tokens and words of the vocabulary."""
CPU_TILES_FORWARD, CPU_TILES_BACKWARD = 4, 7
"""Tiles in fp32 that the head keeps at once where it has no Triton kernel."""
LOGIT_COPIES = 3
"""Copies of the next token's logits in fp32 while transformers samples: logits, processed logits,
probabilities.
"""
AUTOCAST_BYTES = 2
"""Width of a value under autocast."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A job on one rank, as far as the closed form depends on it.

    Attributes:
        parameters: of the model; tied weights count once.
        trained: parameters that are trained.
        value_bytes: width of a weight.
        autocast: the forward pass computes in 16 bits.
        reference: a second model is kept.
        optimizer_states: tensors of the trained weights' size that the optimizer keeps on the device.
        whole_update: the optimizer computes the update of all parameters before it applies it.
        weight_shards, gradient_shards, optimizer_shards: over how many ranks each is divided.
        layers, hidden, heads, key_value_heads, head_size, intermediate, vocabulary: of the model's
            configuration.
        rows: of a micro-batch.
        row_tokens: of a row, padding included.
        scored_tokens: of a row, those whose log-probabilities are computed on a GPU.
        checkpointing: gradient checkpointing is on.
        accumulates: several micro-batches make up an optimizer step.
        generated_rows: that one rank generates at once; 0 if another program generates.
        on_gpu: the kernels are those of a GPU.
    """

    parameters: int
    trained: int
    value_bytes: float
    autocast: bool
    reference: bool
    optimizer_states: float
    whole_update: bool
    weight_shards: int
    gradient_shards: int
    optimizer_shards: int
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    rows: int
    row_tokens: int
    scored_tokens: int
    checkpointing: bool
    accumulates: bool
    generated_rows: int
    on_gpu: bool

    @property
    def compute_bytes(self) -> float:
        """Width of a value in the forward pass."""
        return AUTOCAST_BYTES if self.autocast else self.value_bytes

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch, padding included."""
        return self.rows * self.row_tokens


def peaks(sizes: Sizes) -> dict[str, float]:
    """Return the bytes that one rank needs, by name of the phase; `state` is what is kept while nothing is
    computed, with gradients.
    """
    weights = sizes.parameters * sizes.value_bytes
    gradients = sizes.trained * sizes.value_bytes / sizes.gradient_shards
    states = sizes.optimizer_states * sizes.trained * sizes.value_bytes / sizes.optimizer_shards
    update = sizes.trained * sizes.value_bytes / sizes.optimizer_shards if sizes.whole_update else 0.0
    kept = weights * (2 if sizes.reference else 1) / sizes.weight_shards + states
    cast = sizes.autocast and sizes.value_bytes > AUTOCAST_BYTES
    copies = sizes.parameters * AUTOCAST_BYTES if cast else 0.0
    layer = sizes.tokens * _layer_bytes(sizes)
    one = sizes.tokens * sizes.hidden * (4 if sizes.autocast else sizes.compute_bytes)
    activations = sizes.layers * one + layer if sizes.checkpointing else sizes.layers * layer
    forward_head, backward_head = _head(sizes)
    earlier = gradients if sizes.accumulates else 0.0
    at_start = earlier + copies + activations + backward_head + sizes.vocabulary * sizes.hidden * 4
    at_end = gradients + layer + (one if sizes.checkpointing else 0.0)
    return {
        "state": kept + gradients,
        "generate": kept + copies + cache_bytes(sizes),
        "score": kept + copies + layer / 3 + forward_head,
        "forward": kept + earlier + copies + activations + forward_head,
        "backward": kept + max(at_start, at_end),
        "optimizer": kept + gradients + update,
    }


def cache_bytes(sizes: Sizes) -> float:
    """Return what generation by transformers needs beside the weights: the cache of keys and values, and
    logits.
    """
    entry = 2 * sizes.key_value_heads * sizes.head_size * sizes.compute_bytes
    # the cache of one layer is copied when a token is appended
    cache = entry * sizes.generated_rows * sizes.row_tokens * (sizes.layers + 1)
    return cache + LOGIT_COPIES * 4 * sizes.generated_rows * sizes.vocabulary


def _layer_bytes(sizes: Sizes) -> float:
    """Bytes per token of what one layer keeps for backward: residuals, normalizations, attention, MLP."""
    attention = 6 * sizes.heads * sizes.head_size
    return sizes.compute_bytes * (6 * sizes.hidden + attention + 4 * sizes.intermediate)


def _head(sizes: Sizes) -> tuple[float, float]:
    """Bytes of the language-model head in forward and in backward."""
    width = sizes.compute_bytes
    valid = sizes.rows * sizes.scored_tokens if sizes.on_gpu else sizes.tokens
    rows = min(valid, TILE_TOKENS)
    # a tile is as wide for a small vocabulary
    fixed = rows * TILE_WORDS * width + valid * sizes.hidden * (width + 4)
    if sizes.on_gpu:
        return fixed, fixed
    copy = 4 * rows * min(sizes.vocabulary, TILE_WORDS)
    return fixed + CPU_TILES_FORWARD * copy, fixed + CPU_TILES_BACKWARD * copy
