"""TRL accepts the arguments of a recipe, and the trainer gets the intended examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from trl import GRPOConfig

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers.recipes import training
from grpo_run.trainers.recipes.arithmetic import CHARACTERS, demonstrations
from grpo_run.trainers.recipes.recipe import load_recipe, packaged_recipes
from grpo_run.trainers.recipes.training import encoder, load_policy, trainer_arguments


@pytest.mark.parametrize("name", packaged_recipes())
def test_packaged_recipes_are_accepted(name: str, tmp_path: Path) -> None:
    """By TRL's parser. Without an accelerator they train on the CPU in full precision."""
    recipe = load_recipe(name, [f"output_dir={tmp_path}"])
    training.check(recipe)
    arguments = trainer_arguments(GRPOConfig, recipe, "grpo")
    assert arguments.output_dir == str(tmp_path / "grpo")
    assert arguments.learning_rate == float(recipe.grpo["learning_rate"])
    assert arguments.use_cpu is not torch.accelerator.is_available()
    assert arguments.bf16 is (recipe.grpo.get("bf16", False) and torch.accelerator.is_available())
    assert (arguments.gradient_checkpointing, arguments.logging_steps) == (
        recipe.grpo.get("gradient_checkpointing", False),
        1,
    )


@dataclass
class BeforeTransformers5(GRPOConfig):
    """The two arguments of warm-up that transformers 4 has."""

    warmup_steps: int = 0
    warmup_ratio: float = 0.0


@pytest.mark.parametrize(
    ("given", "expected"), [("0.1", (0, 0.1)), ("1e-1", (0, 0.1)), ("1", (1, 0.0)), ("20", (20, 0.0))]
)
def test_a_share_of_steps_is_a_ratio_before_transformers_5(given: str, expected: tuple[int, float]) -> None:
    recipe = load_recipe("arithmetic", [f"grpo.warmup_steps={given}"])
    arguments = trainer_arguments(BeforeTransformers5, recipe, "grpo")
    assert (arguments.warmup_steps, arguments.warmup_ratio) == expected


@pytest.mark.parametrize("kind", [GRPOConfig, BeforeTransformers5])
@pytest.mark.parametrize(
    ("given", "said"),
    [("soon", "--warmup_steps.*'soon'"), ("[a]", "--warmup_steps.*'a'"), ("null", "NoneType")],
)
def test_warm_up_that_is_no_number_is_one_line(kind: type, given: str, said: str) -> None:
    recipe = load_recipe("arithmetic", [f"grpo.warmup_steps={given}"])
    with pytest.raises(ConfigError, match=said) as refused:
        trainer_arguments(kind, recipe, "grpo")
    assert "\n" not in str(refused.value)


def test_the_loss_covers_only_the_completion() -> None:
    """The prompt is masked; the end token is not, so that the model learns to stop."""
    model, tokenizer = load_policy(load_recipe("arithmetic"), characters=CHARACTERS)
    rows = demonstrations(0, 20)
    encoded = rows.with_transform(encoder(tokenizer))[:20]
    for prompt, completion, ids, labels in zip(
        rows["prompt"], rows["completion"], encoded["input_ids"], encoded["labels"], strict=True
    ):
        assert tokenizer.decode(ids) == prompt + completion + tokenizer.eos_token
        assert labels == [-100] * len(prompt) + ids[len(prompt) :]
    assert max(max(ids) for ids in encoded["input_ids"]) < model.config.vocab_size


def test_a_saved_model_is_loaded_by_path(tmp_path: Path) -> None:
    """`model=PATH` loads what an earlier run saved in `final`."""
    model, tokenizer = load_policy(load_recipe("arithmetic"), characters=CHARACTERS)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    name, loaded = load_policy(load_recipe("gsm8k", [f"model={tmp_path}"]))
    assert name == str(tmp_path)
    assert loaded.padding_side == "left"
    assert loaded("1+2:")["input_ids"] == tokenizer("1+2:")["input_ids"]
