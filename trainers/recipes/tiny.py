"""A model small enough to train on two CPU cores, and its tokenizer, both built without files or network.

Called by the recipes if `model` is `tiny`. The seed alone determines the weights. Does not load pretrained
models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, END = "<pad>", "<end>"


def tiny_tokenizer(characters: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, plus padding and end of sequence.

    Args:
        characters: the printable ASCII characters that occur; a small vocabulary needs far fewer training
            steps. None uses one token for each of the 256 byte values, which encodes any text except the
            names of the two special tokens.
    """
    assert characters is None or (characters.isascii() and characters.isprintable() and " " not in characters)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet() if characters is None else characters)
    vocabulary = {token: number for number, token in enumerate([PAD, END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrapped(tokenizer)


def learned_tokenizer(texts: Sequence[str], vocabulary: int = 2048) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer that is trained on texts.

    The texts alone determine it, so that every rank builds the same one, also after a restart.

    Args:
        texts: to learn the merges from.
        vocabulary: most tokens, with the 256 byte values and the two special ones.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _wrapped(tokenizer)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        padding_side="left",
        model_input_names=[
            "input_ids",
            "attention_mask",
        ],  # transformers 4 adds types, which no model here takes
    )


def tiny_model(
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerFast,
    width: int = 64,
    layers: int = 2,
    context_tokens: int = 2048,
) -> Qwen2ForCausalLM:
    """Return a Qwen2 model with random weights; 150,000 parameters at the default size.

    Args:
        seed: determines the weights. The caller's random state is not changed.
        tokenizer: determines the size of the embedding and the special tokens.
        width: hidden size, a multiple of 16.
        layers: number of decoder layers.
        context_tokens: maximum length of prompt and completion together.
    """
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16,
        num_key_value_heads=width // 16,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        # the default of 0.02 suits hidden sizes in the thousands; a narrow model trains faster with more
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model
