"""The tiny model and its tokenizer: determined by the seed, and able to encode their data."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_run.trainers.recipes.arithmetic import CHARACTERS
from grpo_run.trainers.recipes.tiny import END, PAD, learned_tokenizer, tiny_model, tiny_tokenizer

ALL_BYTES = tiny_tokenizer()


@given(st.text(max_size=100).filter(lambda text: PAD not in text and END not in text))
def test_any_text_round_trips_through_the_byte_tokenizer(text: str) -> None:
    """GSM8K contains typographic quotes and currency signs.

    Only the names of the special tokens are excluded.
    """
    encoded = ALL_BYTES(text, add_special_tokens=False)["input_ids"]
    assert len(encoded) == len(text.encode())
    assert ALL_BYTES.decode(encoded, skip_special_tokens=True, clean_up_tokenization_spaces=False) == text


def test_each_character_is_one_token() -> None:
    """The small vocabulary encodes the sums."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    assert len(tokenizer) == len(CHARACTERS) + 2
    assert tokenizer.decode(tokenizer("27+15:20+10=30,")["input_ids"]) == "27+15:20+10=30,"


def test_the_seed_determines_the_weights() -> None:
    """They are equal on every rank and after every restart. The caller's random state does not change."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    state = torch.random.get_rng_state()
    one, same, other = (tiny_model(seed=seed, tokenizer=tokenizer).state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)


def test_model_and_tokenizer_can_be_saved_and_loaded(tmp_path: Path) -> None:
    """The `from_pretrained` methods of transformers load them."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    model = tiny_model(seed=0, tokenizer=tokenizer)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert (again.pad_token_id, again.eos_token_id) == (tokenizer.pad_token_id, tokenizer.eos_token_id)
    assert again("1+2:")["input_ids"] == tokenizer("1+2:")["input_ids"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


TEXTS = [f"Ann has {count} apples, and £{count * 7} in “her” bag.\n#### {count * 8}" for count in range(200)]


def test_a_learned_tokenizer_encodes_any_text_in_fewer_tokens() -> None:
    """Bytes that it has not seen, too; the vocabulary is bounded."""
    tokenizer = learned_tokenizer(TEXTS, vocabulary=300)
    assert len(tokenizer) == 300
    for text in (TEXTS[7], "汉字 \U0001f600 \x00 ####"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert len(tokenizer(TEXTS[7])["input_ids"]) < len(TEXTS[7].encode()) / 2
