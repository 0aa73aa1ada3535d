"""A random model of 70,000 parameters and a character tokenizer; the examples need no network.

Imported by the examples in this folder. Your own script would call `from_pretrained` instead.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed


def tiny(characters: str, seed: int = 0) -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    """Return a model with random weights, and a tokenizer with one token for each character."""
    backend = Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(["<pad>", "<end>", *characters])})
    )
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()  # without it, decoded characters are separated by spaces
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        padding_side="left",
        model_input_names=[
            "input_ids",
            "attention_mask",
        ],  # transformers 4 adds types, which Qwen2 does not take
    )
    set_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config), tokenizer
