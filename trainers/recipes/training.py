"""Training code that the recipes share: load the policy, train with SFT and GRPO, save the weights.

Called by the tasks, on every rank. It is what a user's own script would contain: it does not depend on
grpo-run's launcher and runs the same under torchrun.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeAlias

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, TrlParser

from grpo_run.runtime.errors import ConfigError
from grpo_run.trainers import caps
from grpo_run.trainers.recipes.recipe import DEFAULTS, TINY, Recipe, nearest
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


def trainer_arguments(kind: type, recipe: Recipe, name: str, **fixed: Any) -> Any:
    """Return the arguments of a trainer: a section of the recipe, read by TRL's parser.

    Args:
        kind: dataclass of the arguments.
        name: of the section, and of the subdirectory of the recipe's output directory.
        fixed: arguments that the section cannot change.

    Raises:
        ConfigError: the section has a key or a value that the dataclass does not take.
    """
    values = {**DEFAULTS, **(getattr(recipe, name) or {}), **fixed}
    if not torch.accelerator.is_available():
        values |= {"use_cpu": True, "bf16": False}
    values |= {
        "output_dir": str(Path(recipe.output_dir).expanduser() / name),
        "seed": recipe.seed,
        # the ranks' output goes to log files, which a progress bar would fill
        "disable_tqdm": True,
        # every parameter takes part in these losses, so the search would only cost time in each step
        "ddp_find_unused_parameters": False,
    }
    known = [field.name for field in fields(kind)]
    with contextlib.suppress(TypeError, ValueError):  # the parser names what is no number
        if "warmup_ratio" in known and 0 < float(values.get("warmup_steps", 0)) < 1:
            values["warmup_ratio"] = values.pop("warmup_steps")  # before transformers 5
    parser = TrlParser(kind, exit_on_error=False, allow_abbrev=False)
    unknown = parser.set_defaults_with_config(**values)
    if unknown:
        key = unknown[0].lstrip("-")
        hint = nearest(key, known)
        raise ConfigError(f"{name}: {kind.__name__} has no key {key!r}{hint}")
    # as words, because a parser does not check the types of its defaults
    words = [word for key, value in values.items() for word in _words(key, value)]
    try:
        (arguments,) = parser.parse_args_into_dataclasses(args=words)
    except (argparse.ArgumentError, ValueError, TypeError) as error:
        raise ConfigError(f"{name}: {' '.join(str(error).split())}") from None
    return arguments


def _words(key: str, value: Any) -> list[str]:
    if isinstance(value, list) and value:
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={value}"] if isinstance(value, str | int | float) else []


def check(recipe: Recipe) -> None:
    """Check the sections that TRL and transformers read.

    Raises:
        ConfigError: one is invalid.
    """
    kinds = {"sft": SFTConfig, "weaver": TrainingArguments, "grpo": GRPOConfig}
    for name, kind in kinds.items():
        if getattr(recipe, name) is not None:
            trainer_arguments(kind, recipe, name)


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
    trainer = SFTTrainer(
        model=model,
        args=trainer_arguments(
            SFTConfig,
            recipe,
            "sft",
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
        args=trainer_arguments(GRPOConfig, recipe, "grpo"),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    if recipe.caps is not None:
        caps.apply(trainer, repetition=recipe.caps.repetition, max_time=recipe.caps.max_time)
    trainer.train()
    # on every rank: sharded weights are gathered from all ranks; rank 0 writes them
    trainer.save_model(str(Path(recipe.output_dir).expanduser() / "final"))
