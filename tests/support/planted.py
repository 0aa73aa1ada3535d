"""A model whose next token is planted: token t is followed by `successor[t]`, always, or with a given
probability.

Attention and MLP are switched off and the embeddings are one-hot vectors, so greedy decoding follows the
table for ever. Real transformers code generates with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def planted(successors: Sequence[int], *, pad: int, eos: int) -> Qwen2ForCausalLM:
    """Return the model.

    Args:
        successors: the token that follows each token of the vocabulary.
    """
    size = -(-len(successors) // 8) * 8
    config = Qwen2Config(
        vocab_size=len(successors),
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(20.0)  # so that sampling follows the table, too
        embedding, head = torch.zeros(len(successors), size), torch.zeros(len(successors), size)
        for token, successor in enumerate(successors):
            embedding[token, token] = 1.0
            head[successor, token] = 1.0
        model.model.embed_tokens.weight.copy_(embedding)
        model.lm_head.weight.copy_(head)
    model.generation_config.eos_token_id = eos
    model.generation_config.pad_token_id = pad
    return model.eval()


def cycle(tokens: Sequence[int], vocabulary: int) -> list[int]:
    """Return successors in which these tokens follow one another in a circle, and every other token leads
    into it.
    """
    successors = [tokens[0]] * vocabulary
    for token, successor in zip(tokens, [*tokens[1:], tokens[0]], strict=True):
        successors[token] = successor
    return successors
