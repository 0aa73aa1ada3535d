"""What the recipes share of TRL: the policy, the warm start, the reinforcement, the final weights.

Called by the recipes, on every rank. This is what a user's own script would hold: it knows nothing of the
supervisor, and runs the same under torchrun.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from grpo_run.trainers.recipes.recipe import Recipe, TrainerSection
from grpo_run.trainers.recipes.tiny import TINY, tiny_model, tiny_tokenizer

Reward: TypeAlias = Callable[..., list[float]]
Policy: TypeAlias = PreTrainedModel | str
"""A model, or the name of one that TRL loads itself, with the dtype and device map it wants."""

IGNORED_LABEL = -100
"""The index that `torch.nn.functional.cross_entropy` passes over."""


def load_policy(recipe: Recipe, characters: str | None = None) -> tuple[Policy, PreTrainedTokenizerBase]:
    """The model and the tokenizer the recipe names; `tiny` ones are made on the spot.

    Args:
        recipe: its `model` and `seed` are read.
        characters: the tiny tokenizer's vocabulary; None for all bytes.
    """
    if recipe.model == TINY:
        tokenizer = tiny_tokenizer(characters)
        return tiny_model(seed=recipe.seed, tokenizer=tokenizer), tokenizer
    name = str(Path(recipe.model).expanduser()) if recipe.model.startswith("~") else recipe.model
    return name, AutoTokenizer.from_pretrained(name, padding_side="left")


def shared_arguments(recipe: Recipe, section: TrainerSection, name: str) -> dict[str, Any]:
    """What both of TRL's configurations take: the section's keys, the place, and what the machine decides."""
    arguments = section.arguments()
    if not torch.accelerator.is_available():
        arguments |= {"use_cpu": True, "bf16": False}
    return {
        **arguments,
        "output_dir": str(Path(recipe.output_dir).expanduser() / name),
        "seed": recipe.seed,
        # the ranks' output goes to files, where a bar that rewrites its line is noise
        "disable_tqdm": True,
        # no parameter is ever left out of these losses; looking for some costs a walk of the graph a step
        "ddp_find_unused_parameters": False,
    }


def encoder(
    tokenizer: PreTrainedTokenizerBase,
) -> Callable[[dict[str, list[str]]], dict[str, list[list[int]]]]:
    """A data set's transform from `prompt` and `completion` to `input_ids` and `labels`, the prompt masked."""

    def encode(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        prompts = tokenizer(rows["prompt"], add_special_tokens=False)["input_ids"]
        completions = tokenizer(rows["completion"], add_special_tokens=False)["input_ids"]
        endings = [[*completion, tokenizer.eos_token_id] for completion in completions]
        pairs = list(zip(prompts, endings, strict=True))
        return {
            "input_ids": [prompt + ending for prompt, ending in pairs],
            "labels": [[IGNORED_LABEL] * len(prompt) + ending for prompt, ending in pairs],
        }

    return encode


def warm_start(
    recipe: Recipe, model: Policy, tokenizer: PreTrainedTokenizerBase, dataset: Dataset
) -> PreTrainedModel:
    """Supervised training on columns `prompt` and `completion` of plain text, the loss on the completion alone.

    Examples are encoded when they are drawn: encoding all of them first would be done again after every
    restart, before the run could go on. Returns the trained model.
    """
    assert recipe.sft is not None

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            **shared_arguments(recipe, recipe.sft, "sft"),
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
        ),
        train_dataset=dataset.with_transform(encoder(tokenizer)),
        processing_class=tokenizer,
    )
    trainer.train()
    trained: PreTrainedModel = trainer.model
    return trained


def reinforce(
    recipe: Recipe,
    model: Policy,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    rewards: list[Reward],
) -> None:
    """GRPO on column `prompt`; the other columns go to the rewards. The weights end up in `<output_dir>/final`."""
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(**shared_arguments(recipe, recipe.grpo, "grpo")),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
    # on every rank: gathering sharded weights takes all of them, writing is rank 0's
    trainer.save_model(str(Path(recipe.output_dir).expanduser() / "final"))
