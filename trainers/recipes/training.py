"""Training code that the recipes share: load the policy, train with SFT and GRPO, save the weights.

Called by the tasks, on every rank. It is what a user's own script would contain: it does not depend on
grpo-run's launcher and runs the same under torchrun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from grpo_run.trainers import caps
from grpo_run.trainers.recipes.recipe import TINY, Recipe, TrainerSection
from grpo_run.trainers.recipes.tiny import learned_tokenizer, tiny_model, tiny_tokenizer

Reward: TypeAlias = Callable[..., list[float]]
Policy: TypeAlias = PreTrainedModel | str
"""A model, or the name of a model that TRL loads itself, with its own dtype and device map."""

IGNORED_LABEL = -100
"""Default `ignore_index` of `torch.nn.functional.cross_entropy`."""


def load_policy(
    recipe: Recipe, *, characters: str | None = None, texts: Sequence[str] | None = None
) -> tuple[Policy, PreTrainedTokenizerBase]:
    """Return the recipe's model and tokenizer. The `tiny` ones are built here.

    Args:
        characters: vocabulary of the tiny tokenizer; None for all byte values.
        texts: from which the tiny tokenizer learns its vocabulary instead.
    """
    if recipe.model == TINY:
        tokenizer = tiny_tokenizer(characters) if texts is None else learned_tokenizer(texts)
        return tiny_model(seed=recipe.seed, tokenizer=tokenizer), tokenizer
    name = str(Path(recipe.model).expanduser()) if recipe.model.startswith("~") else recipe.model
    return name, AutoTokenizer.from_pretrained(name, padding_side="left")


def shared_arguments(recipe: Recipe, section: TrainerSection, name: str) -> dict[str, Any]:
    """Return the arguments of both TRL configuration classes: the section, the output directory, the device.

    Args:
        name: subdirectory of the recipe's output directory.
    """
    arguments = section.arguments()
    if not torch.accelerator.is_available():
        arguments |= {"use_cpu": True, "bf16": False}
    return {
        **arguments,
        "output_dir": str(Path(recipe.output_dir).expanduser() / name),
        "seed": recipe.seed,
        # the ranks' output goes to log files, which a progress bar would fill
        "disable_tqdm": True,
        # every parameter takes part in these losses, so the search would only cost time in each step
        "ddp_find_unused_parameters": False,
    }


Transform: TypeAlias = Callable[[dict[str, list[Any]]], dict[str, list[list[int]]]]


def encoder(tokenizer: PreTrainedTokenizerBase) -> Transform:
    """Return a transform from `prompt` and `completion` to `input_ids` and masked `labels`."""

    def encode(rows: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
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
    recipe: Recipe,
    model: Policy,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    transform: Transform | None = None,
) -> PreTrainedModel:
    """Train with SFT and return the model.

    Examples are encoded when they are drawn. Encoding all of them first would delay every restart.

    Args:
        transform: of rows to `input_ids` and `labels`; by default `encoder`'s, for `prompt` and `completion`.
    """
    assert recipe.sft is not None

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            **shared_arguments(recipe, recipe.sft, "sft"),
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
        ),
        train_dataset=dataset.with_transform(transform or encoder(tokenizer)),
        processing_class=tokenizer,
    )
    trainer.train()
    trained: PreTrainedModel = trainer.model
    return trained


def train_grpo(
    recipe: Recipe, model: Policy, tokenizer: PreTrainedTokenizerBase, dataset: Dataset, rewards: list[Reward]
) -> None:
    """Train with GRPO on the column `prompt` and save the weights to `final` in the output directory.

    The other columns are passed to the rewards.
    """
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=rewards,
        args=GRPOConfig(**shared_arguments(recipe, recipe.grpo, "grpo")),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    if recipe.caps is not None:
        caps.apply(trainer, repetition=recipe.caps.repetition, max_time=recipe.caps.max_time)
    trainer.train()
    # on every rank: sharded weights are gathered from all ranks; rank 0 writes them
    trainer.save_model(str(Path(recipe.output_dir).expanduser() / "final"))
