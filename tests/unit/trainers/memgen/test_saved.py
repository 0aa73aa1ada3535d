"""A saved MemGen answers as the one that was saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers import memgen
from grpo_run.trainers.memgen.generation import GenerationSettings, generate
from grpo_run.trainers.memgen.model import MemGen
from grpo_run.trainers.memgen.saved import save
from grpo_run.trainers.memory_settings import MemorySettings
from grpo_run.trainers.recipes.tiny import tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer("abcdefghij,;")
PROMPTS = ["abc", "j", "ff,ghij"]


def test_what_is_loaded_answers_as_what_was_saved(tmp_path: Path) -> None:
    """Also with trained parts, and without a change of the caller's random state."""
    torch.manual_seed(0)
    sizes = MemorySettings(
        prompt_latents=3, latents=2, augmentations=2, lora_rank=4, lora_targets=["q_proj", "k_proj"]
    )
    made = MemGen(
        tiny_model(seed=1, tokenizer=TOKENIZER, width=32), sizes, TOKENIZER.convert_tokens_to_ids([",", "a"])
    )
    for model in (made.weaver, made.trigger):
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.3)
    settings = GenerationSettings(
        max_tokens=12, end_tokens=[TOKENIZER.eos_token_id], pad_token=TOKENIZER.pad_token_id,
        repetition_penalty=1.2, temperature=0.7,
    )  # fmt: skip
    save(made, TOKENIZER, settings, tmp_path)
    state = torch.random.get_rng_state()
    loaded = memgen.load(tmp_path)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (loaded.memgen.settings, loaded.generation) == (sizes, settings)
    assert loaded.memgen.delimiters == made.delimiters
    for mode in ("none", "always", "argmax"):
        ids = [TOKENIZER(prompt)["input_ids"] for prompt in PROMPTS]
        expected = generate(made, ids, settings, mode)
        assert generate(loaded.memgen, ids, loaded.generation, mode) == expected
        assert loaded.answer(PROMPTS, mode) == TOKENIZER.batch_decode(
            expected.tokens, skip_special_tokens=True
        )


def test_a_folder_without_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{str(tmp_path)!r} has no saved MemGen"):
        memgen.load(tmp_path)
